//! The id of the creation of an inventory.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The id of one creation of an inventory: [`Inventory::creation_id`]. It proves that the
/// inventory existed, so that a store that lost it cannot pass it off as new. It is written
/// as a number, by [`Display`](fmt::Display) and in serialized form.
///
/// [`Inventory::creation_id`]: crate::Inventory::creation_id
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CreationId(pub(super) NonZeroU64);

impl fmt::Display for CreationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for CreationId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        text.parse().map(CreationId).map_err(|_| {
            Error::Invalid(
                "a creation id is the number that `dlock inventory NAME create` printed".into(),
            )
        })
    }
}
