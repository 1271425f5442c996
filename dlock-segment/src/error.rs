//! What can go wrong with an inventory, and what to do about it.

use std::fmt;
use std::time::Duration;

use crate::inventory::HoldState;
use crate::store::Id;

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call on an inventory failed. The regular answers (sold out, not started) are
/// not errors; see [`Deduction`](crate::Deduction).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// An argument is out of bounds; nothing was changed. Fix the call.
    Invalid(String),
    /// There is no such inventory, or no such operation in it.
    NotFound(String),
    /// The inventory existed, was not removed, and is not there any more: the store lost
    /// its data. Nothing was changed. Do not create it again before you know what was sold.
    Lost(String),
    /// The name belongs to an inventory with other terms, or the id to another request;
    /// nothing was changed.
    Conflict(String),
    /// The reservation is not open any more (expired, cancelled, ...), so it cannot be
    /// confirmed or extended; nothing was changed. If the buyer has paid for it, give the
    /// money back, or reserve again under a new id. Only
    /// [`extend`](crate::ReservationHandle::extend) says that it is `Confirmed` or
    /// `Refunded`: its units were sold, and need no extension.
    NotHeld(HoldState),
    /// The store did not answer, so it is not known whether the request was applied. With
    /// an operation id, [`Inventory::resolve`](crate::Inventory::resolve) settles it, and
    /// so does the same call again.
    Unknown(Option<OperationId>),
    /// The rate limit of this process is reached; nothing was sent.
    Throttled {
        /// The time until the next request is let through.
        retry_after: Duration,
    },
    /// Homes of the inventory cannot be reached. The others do not have what was asked for,
    /// so it is not known whether it is there: it may be sold out or not, the operation may
    /// exist or not. A request for units was not applied; a change of the settings reached the
    /// other homes, and the next process that levels the homes brings it to these.
    OutOfReach {
        /// The homes that did not answer.
        homes: Vec<u32>,
    },
    /// The store could not be used; nothing was applied.
    Store(dlock::Error),
}

/// The id of an operation whose outcome is not known; see [`Error::Unknown`].
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct OperationId(pub(crate) Id);

impl OperationId {
    /// The id as it was given with the request.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OperationId(..)")
    }
}

impl AsRef<str> for OperationId {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl Error {
    /// Whether the same call may succeed later without a fix. After `Unknown`, a call
    /// without an operation id may have its effect twice.
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Unknown(_) | Error::Throttled { .. } | Error::OutOfReach { .. } => true,
            Error::Store(error) => error.kind().is_retryable(),
            Error::Invalid(_)
            | Error::NotFound(_)
            | Error::Lost(_)
            | Error::Conflict(_)
            | Error::NotHeld(_) => false,
        }
    }

    /// The error of the store during a call that changes something.
    pub(crate) fn of_store(error: dlock::Error) -> Self {
        match error.kind() {
            dlock::ErrorKind::Unknown => Error::Unknown(None),
            _ => Error::Store(error),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Invalid(what) => write!(f, "invalid argument: {what}"),
            Error::NotFound(what) => write!(f, "not found: {what}"),
            Error::Lost(what) => write!(f, "lost: {what}"),
            Error::Conflict(what) => write!(f, "conflict: {what}"),
            Error::NotHeld(state @ (HoldState::Confirmed | HoldState::Refunded)) => {
                write!(f, "the reservation is already {state:?}, so it was not extended")
            }
            Error::NotHeld(state) => write!(
                f,
                "the reservation is not open but {state:?}, so nothing was sold or extended; if it was paid for, give the money back or reserve again under a new id"
            ),
            Error::Unknown(Some(_)) => f.write_str(
                "outcome unknown: the store did not answer; call resolve() with the operation id, or send the same request again",
            ),
            Error::Unknown(None) => f.write_str(
                "outcome unknown: the store did not answer, and without an operation id nobody can find out; give every request an .operation(id)",
            ),
            Error::Throttled { retry_after } => {
                write!(f, "too many requests in this process; try again in {retry_after:?}")
            }
            Error::OutOfReach { homes } => {
                let homes: Vec<String> = homes.iter().map(u32::to_string).collect();
                write!(f, "home {} of the inventory cannot be reached, and the other homes alone cannot answer this request; it took no units; try again when the server is back", homes.join(", "))
            }
            Error::Store(error) => write!(f, "the store cannot be used: {error}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Store(error) => Some(error),
            _ => None,
        }
    }
}

impl From<dlock::Error> for Error {
    fn from(error: dlock::Error) -> Self {
        match error.kind() {
            dlock::ErrorKind::Invalid => Error::Invalid(error.to_string()),
            _ => Error::of_store(error),
        }
    }
}
