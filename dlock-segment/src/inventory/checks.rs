//! Checks of arguments, and the errors that unexpected answers become.

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

pub(super) fn checked_optional_id(what: &str, id: Option<&str>) -> Result<Option<Id>> {
    id.map(|id| checked_id(what, id)).transpose()
}

/// The suffix that makes an operation id the id of its refund, if the refund was given
/// none. Ids of users contain no control characters.
pub(super) const WHOLE_REFUND: &str = "\u{1}refund";

/// What makes an operation id the id of a correction of [`reconcile`](super::reconcile). The
/// number of units that were left follows.
pub(super) const RECONCILED: &str = "\u{1}reconcile:";

/// The operation that an id was made for by one of these suffixes, else the id.
pub(super) fn purchase_of(id: &str) -> &str {
    let corrected = id.rsplit_once(RECONCILED);
    let corrected = corrected.filter(|(_, left)| left.bytes().all(|byte| byte.is_ascii_digit()));
    id.strip_suffix(WHOLE_REFUND).or(corrected.map(|(of, _)| of)).unwrap_or(id)
}

/// Checks an id that a user gave, or that was made for an operation.
pub(super) fn checked_own_id(what: &str, id: &str) -> Result<Id> {
    checked_id(what, purchase_of(id))?;
    Ok(id.into())
}

pub(super) fn checked_quantity(what: &str, quantity: u64) -> Result<u64> {
    if quantity == 0 || quantity > MAX_QUANTITY {
        return Err(Error::Invalid(format!("{what} must be 1 to {MAX_QUANTITY}")));
    }
    Ok(quantity)
}

/// Checks that it is at least a millisecond and at most ten years.
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
            "this operation id belongs to another request (kind, quantity or buyer); use a new id"
                .into(),
        ),
        Answer::Absent => {
            Error::NotFound("there is no operation with this id, or its retention is over; to refund an older one, give its receipt with .receipt(&receipt)".into())
        }
        Answer::BuyerMissing => {
            Error::Invalid("the inventory limits each buyer; name the buyer with .buyer(id)".into())
        }
        Answer::Full => Error::Store(
            dlock::Error::new(dlock::ErrorKind::Overloaded, dlock::Operation::Inventory).with_message(
                "the limit of cancelled or resolved ids without a request is reached, so nothing was changed; check who may call cancel and resolve, and try again after the retention",
            ),
        ),
        Answer::NotSold => Error::Conflict(
            "the inventory does not count the units of this receipt as sold, so nothing was given back; check that the store lost no data"
                .into(),
        ),
        Answer::TooOld => Error::Conflict(
            "the request was placed so long ago that its record may be forgotten, so nothing was changed; look into your own records, and use a new operation id if it was never applied"
                .into(),
        ),
        Answer::Overflow => Error::Invalid("the inventory would have 2^53 units or more; restock less".into()),
        Answer::Unreadable => Error::Conflict(
            "the record of this operation cannot be read, so nothing was changed; it may have been written by a newer version; audit() lists such records"
                .into(),
        ),
        other => Error::Conflict(format!("the store answered {other:?}")),
    }
}
