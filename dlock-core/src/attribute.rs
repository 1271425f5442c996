//! What the attribute asks of the types around it. The rest of what it expands
//! to are calls that code by hand would make too.

use crate::error::Error;

/// What an annotated function can return without `on_error`: something that can
/// say that the lock was not to be had, or was lost.
///
/// That is every `Result<T, E>` with `E: From<dlock::Error>`, under whatever
/// alias. Implement it for a type of your own to return that:
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
    message = "`{Self}` cannot say that the lock was not to be had",
    label = "cannot carry a lock error",
    note = "return a `Result<T, E>` with `E: From<dlock::Error>`",
    note = "or add `on_error = |error| ..` to the attribute, a closure that makes what the function returns"
)]
pub trait Fallible {
    /// What the function returns instead of its body's value.
    fn from_error(error: Error) -> Self;
}

impl<T, E: From<Error>> Fallible for Result<T, E> {
    fn from_error(error: Error) -> Self {
        Err(error.into())
    }
}

/// Calls a handler of the attribute. As an argument of this, a closure has the
/// type of its own argument inferred.
#[doc(hidden)]
pub fn handled<R>(error: Error, handler: impl FnOnce(Error) -> R) -> R {
    handler(error)
}
