//! Arguments within their bounds, and answers that are errors.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{MAX_ID_BYTES, MAX_QUANTITY};
use crate::error::{Error, Result};
use crate::store::{Answer, Id};

pub(super) fn checked_id(what: &str, id: &str) -> Result<Id> {
    if id.is_empty() || id.len() > MAX_ID_BYTES || id.chars().any(char::is_control) {
        return Err(Error::Invalid(format!(
            "the {what} must have 1 to {MAX_ID_BYTES} bytes and no control characters"
        )));
    }
    Ok(id.into())
}

/// What follows an operation's id in that of its refund, if that was given none. No
/// id of a user contains a control character.
pub(super) const WHOLE_REFUND: &str = "\u{1}refund";

/// An id that was asked for, or that a refund without an id has.
pub(super) fn checked_own_id(what: &str, id: &str) -> Result<Id> {
    checked_id(what, id.strip_suffix(WHOLE_REFUND).unwrap_or(id))?;
    Ok(id.into())
}

pub(super) fn checked_quantity(what: &str, quantity: u64) -> Result<u64> {
    if quantity == 0 || quantity > MAX_QUANTITY {
        return Err(Error::Invalid(format!("{what} must be 1 to {MAX_QUANTITY}")));
    }
    Ok(quantity)
}

/// At least a millisecond and at most ten years.
pub(super) fn checked_millis(what: &str, duration: Duration) -> Result<u64> {
    let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    if millis == 0 || duration > Duration::from_secs(3_650 * 86_400) {
        return Err(Error::Invalid(format!(
            "{what} must be a millisecond at least and ten years at most"
        )));
    }
    Ok(millis)
}

pub(super) fn unix_millis(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn unexpected(answer: &Answer) -> Error {
    match answer {
        Answer::Conflict => Error::Conflict(
            "this operation id stands for another request (kind, quantity or buyer); use a new id"
                .into(),
        ),
        Answer::Absent => {
            Error::NotFound("there is no such operation, or its retention is over".into())
        }
        Answer::BuyerMissing => {
            Error::Invalid("the inventory limits each buyer; name one with .buyer(..)".into())
        }
        Answer::Overflow => Error::Invalid("the inventory would have 2^53 units or more".into()),
        Answer::Unreadable => Error::Conflict(
            "what is kept of this operation cannot be read, so nothing was changed; audit() names it; was it written by a newer version?"
                .into(),
        ),
        other => Error::Conflict(format!("the store answered {other:?}")),
    }
}
