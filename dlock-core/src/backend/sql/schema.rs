//! The tables, for those who make them by hand.

use url::Url;

use super::Sql;
use super::database::Database;
use crate::config::{Config, Settings};
use crate::error::{Error, Result};

/// Something that is done with the backend of a URL.
async fn migrate<D: Database>(backend: Result<Sql<D>>) -> Result<()> {
    backend?.migrate().await
}

/// The statements that make the tables in the database of this configuration.
///
/// ```
/// # #[cfg(feature = "postgres")] {
/// let config = dlock::Config::from_url("postgres://localhost/shop")?;
/// assert!(dlock::backend::sql::schema(&config)?.contains("CREATE TABLE"));
/// # }
/// # Ok::<(), dlock::Error>(())
/// ```
///
/// # Errors
/// `Config` if the URL is not that of a SQL database that is compiled in.
pub fn schema(config: &Config) -> Result<&'static str> {
    match parsed(config)?.scheme() {
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => Ok(super::MySqlDatabase::SCHEMA),
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => Ok(super::PostgresDatabase::SCHEMA),
        #[cfg(feature = "sqlite")]
        "sqlite" => Ok(super::SqliteDatabase::SCHEMA),
        other => Err(no_tables(other)),
    }
}

/// Makes the tables that are missing in the database of this configuration.
///
/// ```
/// # async fn example() -> dlock::Result<()> {
/// let config = dlock::Config::from_url("sqlite:///var/lib/shop/locks.db")?;
/// dlock::backend::sql::make_tables(&config).await?;
/// # Ok(()) }
/// ```
///
/// # Errors
/// `Config` if the URL is not that of a SQL database that is compiled in, `Denied` if the
/// user may not make tables, `Unavailable` if the database cannot be reached.
///
/// # Cancel safety
/// Dropping the future may leave some of the tables made. Calling it again makes the rest.
pub async fn make_tables(config: &Config) -> Result<()> {
    let url = parsed(config)?;
    let mut settings = Settings::from(config.clone());
    settings.migrate = true;
    match url.scheme() {
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => migrate(super::MySql::configured(&settings, &url)).await,
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => migrate(super::Postgres::configured(&settings, &url)).await,
        #[cfg(feature = "sqlite")]
        "sqlite" => migrate(super::Sqlite::configured(&settings, &url)).await,
        other => Err(no_tables(other)),
    }
}

fn parsed(config: &Config) -> Result<Url> {
    let url = config.url.as_deref().unwrap_or_default();
    Url::parse(url).map_err(|_| Error::config("no database is named; set `url`"))
}

fn no_tables(scheme: &str) -> Error {
    Error::config(format!("{scheme}:// has no tables; give the URL of a SQL database"))
}
