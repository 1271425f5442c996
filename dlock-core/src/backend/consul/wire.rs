//! What is sent to Consul and read from it, and what a lock looks like there.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};

use crate::backend::holder_json::HolderJson;
use crate::claim::{Claim, Holder, Owner};

/// The flags that Consul's own clients give to the key of a lock.
pub(super) const LOCK_FLAGS: u64 = 0x2ddc_cbc0_58a5_0c18;
/// The flags that they give to the keys of a semaphore.
pub(super) const SEMAPHORE_FLAGS: u64 = 0xe0f6_9a2b_aa41_4de0;

/// One operation of a transaction on the key-value store.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Operation {
    #[serde(rename = "KV")]
    kv: KeyOperation,
}

#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
struct KeyOperation {
    verb: &'static str,
    key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flags: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<String>,
}

impl Operation {
    fn new(verb: &'static str, path: &str) -> Self {
        let key = path.to_owned();
        Operation { kv: KeyOperation { verb, key, ..KeyOperation::default() } }
    }

    /// Fails if there is such a key.
    pub(super) fn check_absent(path: &str) -> Self {
        Self::new("check-not-exists", path)
    }

    /// Fails unless the key was changed last by the write with this index.
    pub(super) fn check_index(path: &str, index: u64) -> Self {
        let mut operation = Self::new("check-index", path);
        operation.kv.index = Some(index);
        operation
    }

    /// Fails unless this session holds the key.
    pub(super) fn check_session(path: &str, session: &str) -> Self {
        let mut operation = Self::new("check-session", path);
        operation.kv.session = Some(session.to_owned());
        operation
    }

    /// Takes the key for a session.
    pub(super) fn lock(path: &str, session: &str, value: &str, flags: u64) -> Self {
        let mut operation = Self::new("lock", path);
        operation.kv.session = Some(session.to_owned());
        operation.kv.value = Some(BASE64_STANDARD.encode(value));
        operation.kv.flags = Some(flags);
        operation
    }

    /// Writes a key.
    pub(super) fn set(path: &str, value: &str, flags: u64) -> Self {
        let mut operation = Self::new("set", path);
        operation.kv.value = Some(BASE64_STANDARD.encode(value));
        operation.kv.flags = Some(flags);
        operation
    }

    /// Removes a key.
    pub(super) fn delete(path: &str) -> Self {
        Self::new("delete", path)
    }

    /// Reads all keys with this prefix.
    pub(super) fn get_tree(prefix: &str) -> Self {
        Self::new("get-tree", prefix)
    }

    /// Reads a key, which may be absent.
    pub(super) fn get(path: &str) -> Self {
        Self::new("get-or-empty", path)
    }
}

/// The outcome of a transaction.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct TransactionOutcome {
    #[serde(default)]
    pub(super) results: Option<Vec<TransactionResult>>,
    #[serde(default)]
    pub(super) errors: Option<Vec<OperationError>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct TransactionResult {
    #[serde(rename = "KV")]
    pub(super) kv: Option<Entry>,
}

/// Why one operation of a transaction failed; then nothing was changed.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct OperationError {
    pub(super) op_index: usize,
    pub(super) what: String,
}

impl OperationError {
    pub(super) fn is_lock_delay(&self) -> bool {
        self.what.contains("due to lock delay")
    }

    pub(super) fn is_invalid_session(&self) -> bool {
        self.what.contains("invalid session")
    }

    pub(super) fn is_denied(&self) -> bool {
        self.what.contains("Permission denied")
    }
}

/// A key of the key-value store.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Entry {
    pub(super) key: String,
    #[serde(default)]
    pub(super) flags: u64,
    #[serde(default)]
    value: Option<String>,
    #[serde(default)]
    pub(super) session: Option<String>,
    #[serde(default)]
    pub(super) modify_index: u64,
}

impl Entry {
    /// The session that holds the key.
    pub(super) fn holder(&self) -> Option<&str> {
        self.session.as_deref().filter(|session| !session.is_empty())
    }

    /// The owner that the key names, if a client of dlock wrote it.
    pub(super) fn owner(&self) -> Option<Owner> {
        self.value::<LockValue>()?.owner()
    }

    /// What was written into the key, if a client of dlock did.
    pub(super) fn value<T: for<'a> Deserialize<'a>>(&self) -> Option<T> {
        let bytes = BASE64_STANDARD.decode(self.value.as_deref()?).ok()?;
        serde_json::from_slice(&bytes).ok()
    }
}

/// What to make a session with.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct NewSession<'a> {
    pub(super) name: &'a str,
    #[serde(rename = "TTL")]
    pub(super) ttl: String,
    pub(super) lock_delay: String,
    /// The keys of a session that ended are removed: nothing is left behind.
    pub(super) behavior: &'static str,
    /// Health checks whose failure ends the session. Consul adds `serfHealth`, the health
    /// of the agent's machine, unless this is an empty list.
    pub(super) node_checks: &'a [&'static str],
}

/// The id of a new session.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct SessionId {
    #[serde(rename = "ID")]
    pub(super) id: String,
}

/// A session.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct SessionInfo {
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) node: String,
    #[serde(rename = "TTL", default)]
    pub(super) ttl: String,
}

/// The value of a lock: which claim of the session has it, and who that is.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LockValue {
    /// The owner, in hexadecimal digits. A session takes a key that it has once more, so
    /// this tells the claims of one client apart.
    owner: String,
    #[serde(flatten, with = "HolderJson")]
    holder: Holder,
    /// Milliseconds since 1970.
    since: u64,
    /// For a permit, which has a session of its own: the session of the client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) session: Option<String>,
}

impl LockValue {
    /// The value for a claim that is granted now.
    pub(super) fn of(claim: &Claim) -> String {
        Self::written(claim, None)
    }

    /// The value for a permit that is granted now to the client that has this session.
    pub(super) fn of_permit(claim: &Claim, session: &str) -> String {
        Self::written(claim, Some(session.to_owned()))
    }

    fn written(claim: &Claim, session: Option<String>) -> String {
        let (owner, holder) = (claim.owner.to_string(), Holder::clone(&claim.holder));
        let value = LockValue { owner, holder, since: unix_millis(), session };
        serde_json::to_string(&value).unwrap_or_default()
    }

    fn owner(&self) -> Option<Owner> {
        parse_owner(&self.owner)
    }

    pub(super) fn held_for(&self) -> Duration {
        Duration::from_millis(unix_millis().saturating_sub(self.since))
    }

    pub(super) fn into_holder(self) -> Arc<Holder> {
        Arc::new(self.holder)
    }
}

/// Tells the holder of a lock that it was broken.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct BreakNotice {
    /// The key of the lock in Consul.
    pub(super) path: String,
    /// Who broke it.
    pub(super) by: String,
    /// The owner that had it; empty if that was not a client of dlock.
    owner: String,
}

impl BreakNotice {
    pub(super) fn new(path: &str, by: &Holder, broken: Option<LockValue>) -> Self {
        let owner = broken.map(|value| value.owner).unwrap_or_default();
        BreakNotice { path: path.to_owned(), by: by.to_string(), owner }
    }

    pub(super) fn owner(&self) -> Option<Owner> {
        parse_owner(&self.owner)
    }
}

fn parse_owner(text: &str) -> Option<Owner> {
    u128::from_str_radix(text, 16).ok().map(Owner::from_bits)
}

fn unix_millis() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_is_written_as_consul_reads_it() {
        let lock = Operation::lock("a/.lock", "s", "v", LOCK_FLAGS);
        let written = serde_json::to_string(&[lock]).expect("JSON");
        let expected = r#"[{"KV":{"Verb":"lock","Key":"a/.lock","Value":"dg==","Flags":3304740253564472344,"Session":"s"}}]"#;
        assert_eq!(written, expected);
    }

    #[test]
    fn the_value_of_somebody_else_is_not_ours() {
        let json = r#"{"Key":"a","Flags":1,"Value":"eyJmb28iOjF9","Session":"","ModifyIndex":7}"#;
        let entry: Entry = serde_json::from_str(json).expect("an entry");
        assert!(entry.value::<LockValue>().is_none());
        assert_eq!(entry.holder(), None);
    }
}
