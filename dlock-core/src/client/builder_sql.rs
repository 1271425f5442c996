//! Clients on a SQL database that the program is connected to already.

use std::sync::Arc;

use super::DlockBuilder;
use crate::backend::Backend;
use crate::config::Settings;
use crate::error::Result;

/// A backend that is made when the rest of the configuration is known.
pub(super) type SqlBackend = Box<dyn FnOnce(&Settings) -> Result<Arc<dyn Backend>> + Send>;

impl DlockBuilder {
    /// Makes the tables in a SQL database if they are missing. Without it they must be
    /// there: `dlock schema` makes them.
    #[must_use]
    pub fn migrate(self, migrate: bool) -> Self {
        self.put(|config| config.migrate = Some(migrate))
    }

    /// Uses the database of this pool instead of the URL's. dlock opens two connections of
    /// its own with the options of the pool, and a third one to be notified of hand-overs, with
    /// the time-outs and the thread that locks need; it takes none from the pool.
    ///
    /// ```
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// let pool = sqlx::PgPool::connect("postgres://shop@localhost/shop").await?;
    /// let dlock = dlock::Dlock::builder().postgres(&pool).connect().await?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "postgres")]
    #[must_use]
    pub fn postgres(mut self, pool: &sqlx::PgPool) -> Self {
        let options = (*pool.connect_options()).clone();
        self.sql = Some(Box::new(move |config| {
            Ok(Arc::new(crate::backend::sql::Postgres::given(options, config)))
        }));
        self
    }

    /// Uses the database of this pool instead of the URL's. dlock opens two connections of
    /// its own with the options of the pool; it takes none from the pool.
    ///
    /// ```
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// let pool = sqlx::MySqlPool::connect("mysql://shop@localhost/shop").await?;
    /// let dlock = dlock::Dlock::builder().mysql(&pool).connect().await?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "mysql")]
    #[must_use]
    pub fn mysql(mut self, pool: &sqlx::MySqlPool) -> Self {
        let options = (*pool.connect_options()).clone();
        self.sql = Some(Box::new(move |config| {
            Ok(Arc::new(crate::backend::sql::MySql::given(options, config)))
        }));
        self
    }

    /// Uses the file of this pool instead of the URL's. dlock opens one connection of its
    /// own to the file; it takes none from the pool.
    ///
    /// ```
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// let pool = sqlx::SqlitePool::connect("sqlite:///var/lib/shop/shop.db").await?;
    /// let dlock = dlock::Dlock::builder().sqlite(&pool).connect().await?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "sqlite")]
    #[must_use]
    pub fn sqlite(mut self, pool: &sqlx::SqlitePool) -> Self {
        let path = pool.connect_options().get_filename().to_owned();
        self.sql = Some(Box::new(move |config| {
            Ok(Arc::new(crate::backend::sql::Sqlite::given(&path, config)?))
        }));
        self
    }
}
