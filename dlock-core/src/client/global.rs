//! The client of the whole program, for code that is not given one.

use std::sync::OnceLock;

use super::Dlock;
use crate::error::{Error, ErrorKind, Operation, Result};

static GLOBAL: OnceLock<Dlock> = OnceLock::new();

/// Makes this client the one that [`global`] returns. Call it once, when the
/// program starts.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
/// use dlock::Dlock;
///
/// dlock::init(Dlock::connect("memory://").await?)?;
/// let guard = dlock::global()?.mutex("order:7").lock().await?;
/// # drop(guard);
/// # Ok(()) }
/// ```
///
/// # Errors
/// `Config` if `init` was called before.
pub fn init(dlock: Dlock) -> Result<()> {
    GLOBAL.set(dlock).map_err(|_| {
        Error::config("dlock::init was called before; call it only once, when the program starts")
    })
}

/// The client that this code uses: that of the surrounding
/// [`testing::scope`](crate::testing::scope), else the one given to [`init`].
///
/// # Errors
/// `NoClient` if there is neither.
pub fn global() -> Result<Dlock> {
    crate::testing::scoped().or_else(|| GLOBAL.get().cloned()).ok_or_else(|| {
        Error::new(ErrorKind::NoClient, Operation::Configure).with_message(
            "there is no global client; call dlock::init(Dlock::connect(url).await?) when the program starts, or run a test inside dlock::testing::scope(..)",
        )
    })
}
