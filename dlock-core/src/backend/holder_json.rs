//! A holder in the JSON that is written next to a lock, for operators.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::claim::Holder;

/// The fields of a [`Holder`], between those of what it is a part of:
/// `#[serde(flatten, with = "HolderJson")]`.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Holder")]
pub(super) struct HolderJson {
    client: u64,
    name: String,
    host: String,
    pid: u32,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tags: Vec<(String, String)>,
}

/// A holder that is not a client of dlock.
pub(super) fn foreign_holder(name: impl Into<String>, host: impl Into<String>) -> Arc<Holder> {
    let (name, host) = (name.into(), host.into());
    Arc::new(Holder { client: 0, name, host, pid: 0, tags: Vec::new() })
}
