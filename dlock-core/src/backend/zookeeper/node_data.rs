//! Pure: what is written into nodes, for operators. Other programs ignore it.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::backend::holder_json::{HolderJson, foreign_holder};
use crate::claim::Holder;

/// The data of a node of dlock.
#[derive(Serialize, Deserialize)]
struct NodeData {
    /// The layout version.
    dlock: u32,
    #[serde(flatten, with = "HolderJson")]
    holder: Holder,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    broken: Option<Broken>,
}

/// What an operator who breaks a lock writes into the node of its holder, and into the node
/// of the key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Broken {
    pub(super) by: String,
    /// After how many milliseconds the node is removed.
    pub(super) delay_ms: u64,
}

impl Broken {
    pub(super) fn delay(&self) -> Duration {
        Duration::from_millis(self.delay_ms)
    }
}

#[derive(Serialize, Deserialize)]
struct KeyData {
    dlock: u32,
    broken: Broken,
}

const VERSION: u32 = 1;

pub(super) fn encode(holder: &Holder, broken: Option<Broken>) -> Vec<u8> {
    let data = NodeData { dlock: VERSION, holder: holder.clone(), broken };
    serde_json::to_vec(&data).unwrap_or_default()
}

/// The holder in the data of a node, and whether dlock wrote it.
pub(super) fn decode(data: &[u8]) -> (Arc<Holder>, bool) {
    if let Ok(data) = serde_json::from_slice::<NodeData>(data) {
        return (Arc::new(data.holder), true);
    }
    // Curator writes the address of its host, kazoo an identifier that the program chose.
    let text = std::str::from_utf8(data).unwrap_or("").trim();
    let is_shown = !text.is_empty() && text.len() <= 256 && !text.chars().any(char::is_control);
    let name = if is_shown { text } else { "a program without dlock" };
    (foreign_holder(name, "?"), false)
}

/// Who broke the lock of the node with this data.
pub(super) fn broken(data: &[u8]) -> Option<Broken> {
    serde_json::from_slice::<NodeData>(data).ok()?.broken
}

pub(super) fn encode_key(broken: Broken) -> Vec<u8> {
    serde_json::to_vec(&KeyData { dlock: VERSION, broken }).unwrap_or_default()
}

/// Who broke the lock of the key with this data last.
pub(super) fn key_broken_by(data: &[u8]) -> Option<String> {
    serde_json::from_slice::<KeyData>(data).ok().map(|data| data.broken.by)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let tags = vec![("order".to_owned(), "7".to_owned())];
        let holder = Holder { client: 3, name: "a".into(), host: "b".into(), pid: 4, tags };
        let (read, ours) = decode(&encode(&holder, None));
        assert!(ours);
        assert_eq!(*read, holder);
        let mark = Broken { by: "operator".into(), delay_ms: 500 };
        assert_eq!(broken(&encode(&holder, Some(mark.clone()))), Some(mark.clone()));
        assert_eq!(key_broken_by(&encode_key(mark)).as_deref(), Some("operator"));
    }

    #[test]
    fn other_programs_are_shown_as_they_are() {
        assert_eq!(decode(b"192.168.0.7").0.name, "192.168.0.7");
        for data in [&b""[..], b"\xff\x00", b"a\nb"] {
            let (holder, ours) = decode(data);
            assert!(!ours);
            assert_eq!(holder.name, "a program without dlock");
        }
        assert_eq!(key_broken_by(b""), None);
    }
}
