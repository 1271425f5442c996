//! Pure: where the keys are.
//!
//! A key is a path below the root of the URL, so that other programs find it: the key
//! `orders/7` of `zookeeper://host/shop` is `/shop/orders/7`. The namespace is another node
//! between the two, but the namespace `default` is not.

use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

/// The root of all keys: empty, or a path.
#[derive(Clone, Debug)]
pub(super) struct Root(String);

impl Root {
    /// The root for the path of a URL.
    pub(super) fn new(path: &str, namespace: &str) -> Result<Self> {
        let path = path.trim_matches('/');
        let mut root = String::new();
        if !path.is_empty() {
            if !path.split('/').all(is_name) {
                return Err(Error::config(
                    "the path of the zookeeper:// URL is not the path of a node; write for example zookeeper://host1,host2/locks",
                ));
            }
            root = format!("/{path}");
        }
        if namespace != "default" {
            root = format!("{root}/{namespace}");
        }
        Ok(Root(root))
    }

    /// The path of a key. A leading slash changes nothing.
    pub(super) fn path(&self, key: &Key) -> Result<String> {
        let name = key.as_str().strip_prefix('/').unwrap_or(key.as_str());
        let reserved = self.0.is_empty() && (name == "zookeeper" || name.starts_with("zookeeper/"));
        if reserved || !name.split('/').all(is_name) {
            return Err(Error::new(ErrorKind::Invalid, Operation::Acquire).with_key(key).with_message(
                "a key on zookeeper:// is the path of a node: its parts must not be empty, `.` or `..`, and `zookeeper` is reserved; change the key, or escape values with key!",
            ));
        }
        Ok(format!("{}/{name}", self.0))
    }

    /// The key of a path.
    pub(super) fn key(&self, path: &str) -> Option<Key> {
        Key::new(path.strip_prefix(&self.0)?.strip_prefix('/')?).ok()
    }

    /// The deepest node that all keys with this prefix are below.
    pub(super) fn above(&self, prefix: &str) -> String {
        let prefix = prefix.strip_prefix('/').unwrap_or(prefix);
        match prefix.rsplit_once('/') {
            Some((above, _)) if above.split('/').all(is_name) => format!("{}/{above}", self.0),
            _ if self.0.is_empty() => "/".to_owned(),
            _ => self.0.clone(),
        }
    }
}

/// A node below another one.
pub(super) fn below(path: &str, name: &str) -> String {
    format!("{}/{name}", path.trim_end_matches('/'))
}

/// The node above another one.
pub(super) fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("/", |(parent, _)| parent)
}

/// The node above another one, and all above that, the highest first.
pub(super) fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').filter(|(at, _)| *at > 0).map(|(at, _)| &path[..at])
}

fn is_name(name: &str) -> bool {
    let is_refused =
        |c: char| c.is_control() || matches!(c, '\u{e000}'..='\u{f8ff}' | '\u{fff0}'..='\u{ffff}');
    !matches!(name, "" | "." | "..") && !name.contains(is_refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(root: &Root, key: &str) -> Option<String> {
        root.path(&Key::new(key).unwrap()).ok()
    }

    #[test]
    fn a_key_is_a_path() {
        let root = Root::new("", "default").unwrap();
        assert_eq!(path(&root, "orders/7").as_deref(), Some("/orders/7"));
        assert_eq!(path(&root, "/orders/7").as_deref(), Some("/orders/7"));
        let root = Root::new("/shop/", "eu").unwrap();
        assert_eq!(path(&root, "order:7").as_deref(), Some("/shop/eu/order:7"));
        assert_eq!(root.key("/shop/eu/order:7").unwrap().as_str(), "order:7");
        assert!(root.key("/other").is_none());
    }

    #[test]
    fn what_is_no_path_is_refused() {
        let root = Root::new("", "default").unwrap();
        for bad in ["a//b", "a/", "//", "a/../b", ".", "zookeeper", "zookeeper/quota"] {
            assert_eq!(path(&root, bad), None, "{bad}");
        }
        assert!(Root::new("/a//b", "default").is_err());
        assert!(path(&Root::new("/a", "default").unwrap(), "zookeeper").is_some());
    }

    #[test]
    fn a_listing_starts_as_deep_as_it_can() {
        let root = Root::new("/shop", "default").unwrap();
        assert_eq!(root.above("orders/7"), "/shop/orders");
        assert_eq!(root.above("order"), "/shop");
        assert_eq!(Root::new("", "default").unwrap().above(""), "/");
        assert_eq!(ancestors("/a/b/c").collect::<Vec<_>>(), ["/a", "/a/b"]);
        assert_eq!(below("/", "a"), "/a");
    }
}
