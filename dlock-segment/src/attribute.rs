//! What `#[segmented_lock]` needs from the types around it. Otherwise it expands to calls
//! that could be written by hand.

use dlock::{Dlock, IntoKey};

use crate::lock::{SegmentOutcome, SegmentedLock};

/// A type that a function under `#[segmented_lock]` can return: it says whether the
/// segment was dry.
///
/// [`SegmentOutcome`] and every `Result` of one implement it. Implement it for a type of
/// your own to return that:
///
/// ```
/// use dlock::{Error, Fallible, testing};
/// use dlock_segment::{MayBeDry, segmented_lock};
///
/// #[derive(Debug, PartialEq)]
/// enum Reply { Row(usize), SoldOut, TryLater }
///
/// impl MayBeDry for Reply {
///     fn is_dry(&self) -> bool {
///         *self == Reply::SoldOut
///     }
///     fn dry() -> Self {
///         Reply::SoldOut
///     }
/// }
///
/// impl Fallible for Reply {
///     fn from_error(_: Error) -> Self {
///         Reply::TryLater
///     }
/// }
///
/// #[segmented_lock(key = "stock:{sku}", segments = 2)]
/// async fn buy(sku: u64, full: Option<usize>) -> Reply {
///     if full == Some(segment.index()) { Reply::Row(segment.index()) } else { Reply::SoldOut }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// # testing::scope(async {
/// assert_eq!(buy(7, Some(1)).await, Reply::Row(1));
/// assert_eq!(buy(7, None).await, Reply::SoldOut); // both are
/// # }).await }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` in the return type does not implement `MayBeDry`",
    label = "return a `SegmentOutcome` here",
    note = "return a `Result<SegmentOutcome<T>, E>` with `E: From<dlock::Error>`",
    note = "or a `SegmentOutcome<T>`, and add `on_error = |error| ..` to the attribute"
)]
pub trait MayBeDry {
    /// Whether this segment had nothing left, so that the next one is tried.
    fn is_dry(&self) -> bool;

    /// The value to return when every segment was dry.
    fn dry() -> Self;
}

impl<T> MayBeDry for SegmentOutcome<T> {
    fn is_dry(&self) -> bool {
        matches!(self, SegmentOutcome::Dry)
    }

    fn dry() -> Self {
        SegmentOutcome::Dry
    }
}

impl<T: MayBeDry, E> MayBeDry for Result<T, E> {
    fn is_dry(&self) -> bool {
        self.as_ref().is_ok_and(T::is_dry)
    }

    fn dry() -> Self {
        Ok(T::dry())
    }
}

/// A value that the option `segments` of the attribute can have.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "`{Self}` is neither a number of segments nor their names and weights",
    label = "not `segments`",
    note = "a number is a `u32`; names and weights are an array, a slice or a `Vec` of `(name, u32)`"
)]
pub trait Split {
    fn split(self, dlock: &Dlock, key: impl IntoKey) -> SegmentedLock;
}

impl Split for u32 {
    fn split(self, dlock: &Dlock, key: impl IntoKey) -> SegmentedLock {
        SegmentedLock::new(dlock, key, self)
    }
}

impl<N: Into<String>, const COUNT: usize> Split for [(N, u32); COUNT] {
    fn split(self, dlock: &Dlock, key: impl IntoKey) -> SegmentedLock {
        SegmentedLock::named(dlock, key, self)
    }
}

impl<N: Into<String>> Split for Vec<(N, u32)> {
    fn split(self, dlock: &Dlock, key: impl IntoKey) -> SegmentedLock {
        SegmentedLock::named(dlock, key, self)
    }
}

impl<N: Into<String> + Clone> Split for &[(N, u32)] {
    fn split(self, dlock: &Dlock, key: impl IntoKey) -> SegmentedLock {
        SegmentedLock::named(dlock, key, self.iter().cloned())
    }
}

/// The lock of an annotated function.
#[doc(hidden)]
pub fn split(dlock: &Dlock, key: impl IntoKey, segments: impl Split) -> SegmentedLock {
    segments.split(dlock, key)
}

/// Stands for `segment` and `guard` in a body whose attribute did not compile. It never
/// runs.
#[doc(hidden)]
pub fn unbound<T>() -> &'static T {
    unreachable!("the attribute has an error")
}
