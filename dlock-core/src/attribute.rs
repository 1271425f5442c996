//! What the attribute `#[distributed_lock]` needs at run time. Its expansion
//! otherwise calls only the public API.

use crate::error::Error;

/// A return type of an annotated function that can be made from an [`Error`], for
/// when the lock was not acquired or was lost. Other return types need `on_error`.
///
/// Every `Result<T, E>` with `E: From<dlock::Error>` is one, under any alias.
/// Implement it for your own return type like this:
///
/// ```
/// use dlock::{Error, Fallible, distributed_lock, testing};
///
/// #[derive(Debug, PartialEq)]
/// enum Reply { Paid, TryLater }
///
/// impl Fallible for Reply {
///     fn from_error(_: Error) -> Self {
///         Reply::TryLater
///     }
/// }
///
/// #[distributed_lock(key = "order:{id}", wait = "0s")]
/// async fn pay(id: u64) -> Reply {
///     Reply::Paid
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> dlock::Result<()> {
/// # testing::scope(async {
/// assert_eq!(pay(7).await, Reply::Paid);
/// let busy = testing::force_busy("order:7").await?;
/// assert_eq!(pay(7).await, Reply::TryLater);
/// # drop(busy);
/// # Ok(()) }).await }
/// ```
#[diagnostic::on_unimplemented(
    message = "the function returns `{Self}`, which cannot be made from a `dlock::Error`",
    label = "cannot carry a lock error",
    note = "return a `Result<T, E>` with `E: From<dlock::Error>`: `dlock::Error`, your own error type that implements it, `Box<dyn std::error::Error + Send + Sync>` or `anyhow::Error`",
    note = "or add `on_error = |error| ..` to the attribute, a closure that makes what the function returns; for a `Result<T, String>`, `on_error = |error| Err(error.to_string())`"
)]
pub trait Fallible {
    /// Makes the value that the function returns instead of that of its body.
    fn from_error(error: Error) -> Self;
}

// Otherwise rustc would say only that `String: From<dlock::Error>` is missing, which
// nobody but the standard library could add.
#[diagnostic::do_not_recommend]
impl<T, E: From<Error>> Fallible for Result<T, E> {
    fn from_error(error: Error) -> Self {
        Err(error.into())
    }
}

/// Calls the handler in `on_error`. Passing the closure to a function lets the
/// compiler infer the type of the closure's argument.
#[doc(hidden)]
pub fn handled<R>(error: Error, handler: impl FnOnce(Error) -> R) -> R {
    handler(error)
}
