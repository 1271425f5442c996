//! Where the lock of a key is in Consul, and which clients of others share it.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

/// What may stand in the path of a URL as it is.
const PATH: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'/').remove(b'-').remove(b'_').remove(b'.').remove(b'~');
/// The namespace whose keys have no folder of their own.
const PLAIN_NAMESPACE: &str = "default";
/// Where clients of dlock leave messages for each other.
const NOTICES: &str = "dlock/notices/";
/// Where the fences of sessions are.
const FENCES: &str = "dlock/fences/";
/// Where it is said who broke a lock.
const BROKEN: &str = "dlock/broken/";

/// The layout of locks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// The folder of the namespace, with its slash, or nothing.
    folder: String,
    /// What comes after the name of a lock.
    suffix: &'static str,
}

impl Layout {
    /// The layout that an option names; that of `consul lock` if it does not.
    pub(super) fn new(namespace: &str, layout: Option<&str>) -> Result<Self> {
        let suffix = match layout {
            None | Some("consul-lock") => "/.lock",
            Some("lock-key") => "",
            Some(other) => {
                return Err(Error::config(format!(
                    "`layout` is `{other}`; write `consul-lock` to share locks with the command `consul lock`, or `lock-key` to share them with LockKey of Consul's Go package"
                )));
            }
        };
        let folder = match namespace {
            PLAIN_NAMESPACE => String::new(),
            other => format!("{other}/"),
        };
        Ok(Layout { folder, suffix })
    }

    /// The key of a lock in Consul.
    pub(super) fn path(&self, key: &Key) -> Result<String> {
        let name = key.as_str();
        if name.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(Error::new(ErrorKind::Invalid, Operation::Acquire).with_key(key).with_message(
                "in consul:// a key is a path, and a part between two slashes must not be empty, `.` or `..`; write another key",
            ));
        }
        Ok(format!("{}{name}{}", self.folder, self.suffix))
    }

    /// Whether the keys of semaphores are apart from those of locks: those of `consul lock`
    /// are in the same place with `-n` and without.
    pub(super) fn has_permits(&self) -> bool {
        self.suffix.is_empty()
    }

    /// Where the keys of a semaphore are, with the slash at its end.
    pub(super) fn permits(&self, key: &Key) -> Result<String> {
        self.path(key).map(|path| format!("{path}/"))
    }

    /// The key in Consul that keys with this prefix start with.
    pub(super) fn prefix(&self, prefix: &str) -> String {
        format!("{}{prefix}", self.folder)
    }

    /// The key whose lock or semaphore this is.
    pub(super) fn key(&self, path: &str) -> Option<Key> {
        let name = path.strip_prefix(&self.folder)?;
        let name = name.strip_suffix('/').or_else(|| name.strip_suffix(self.suffix))?;
        Key::new(name).ok()
    }
}

/// The messages for the client that has this session.
pub(super) fn notices(session: &str) -> String {
    format!("{NOTICES}{session}/")
}

/// The fence of this session.
pub(super) fn fence(session: &str) -> String {
    format!("{FENCES}{session}")
}

/// Who broke the lock at this path.
pub(super) fn broken(path: &str) -> String {
    format!("{BROKEN}{path}")
}

/// A path in a URL.
pub(super) fn escaped(path: &str) -> String {
    utf8_percent_encode(path, PATH).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(namespace: &str, layout: Option<&str>, key: &str) -> Result<String> {
        Layout::new(namespace, layout)?.path(&Key::new(key).expect("a key"))
    }

    #[test]
    fn a_lock_is_where_the_clients_of_consul_have_it() {
        assert_eq!(path("default", None, "nightly").expect("a path"), "nightly/.lock");
        assert_eq!(path("shop", None, "nightly").expect("a path"), "shop/nightly/.lock");
        assert_eq!(path("default", Some("lock-key"), "a/b").expect("a path"), "a/b");
    }

    #[test]
    fn paths_that_a_server_would_change_are_refused() {
        for bad in ["/a", "a/", "a//b", "a/../b", "."] {
            assert_eq!(path("default", None, bad).expect_err(bad).kind(), ErrorKind::Invalid);
        }
        assert!(path("default", Some("redisson"), "a").is_err());
    }

    #[test]
    fn the_key_is_read_from_the_path() {
        let layout = Layout::new("shop", None).expect("a layout");
        let key = Key::new("order:7").expect("a key");
        assert_eq!(layout.key(&layout.path(&key).expect("a path")), Some(key));
        assert_eq!(layout.key("other/order:7/.lock"), None);
        assert_eq!(escaped("a b/é:%"), "a%20b/%C3%A9%3A%25");
    }
}
