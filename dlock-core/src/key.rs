//! Keys: the names of what is locked.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use crate::collections::hash_of;
use crate::error::{Error, ErrorKind, Operation};

/// The length of the longest key, in bytes, after escaping.
pub const MAX_KEY_BYTES: usize = 512;

/// The name of something that is locked.
///
/// [`key!`](crate::key!) makes it from a template and escapes every value in it, so
/// that no value can name another key:
///
/// ```
/// # fn main() -> dlock::Result<()> {
/// let user = "7:admin";
/// let key = dlock::key!("user:{user}")?;
/// assert_eq!(key.as_str(), "user:7%3Aadmin");
/// # Ok(()) }
/// ```
///
/// [`Key::new`] makes it from a string and escapes nothing.
///
/// `Debug`, logs and error messages show the template (`user:{user}`), not the
/// values, which may be personal data. [`Key::as_str`] gives the whole key.
#[derive(Clone)]
pub struct Key(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    text: Box<str>,
    /// The template; empty if the key was made from a string.
    template: &'static str,
    hash: u64,
}

impl Key {
    /// Makes a key from exactly this string.
    ///
    /// # Errors
    /// `Invalid` if the string is empty, longer than [`MAX_KEY_BYTES`] or contains a
    /// control character.
    pub fn new(text: impl AsRef<str>) -> Result<Self, Error> {
        Self::checked(text.as_ref(), "")
    }

    fn checked(text: &str, template: &'static str) -> Result<Self, Error> {
        let fault = |what: String| {
            Err(Error::new(ErrorKind::Invalid, Operation::Acquire)
                .with_message(what)
                .with_key_label(template))
        };
        if text.is_empty() {
            return fault("the key is empty; write a name such as `order:7`".into());
        }
        if text.len() > MAX_KEY_BYTES {
            return fault(format!(
                "the key is longer than {MAX_KEY_BYTES} bytes; lock an id or a digest instead of the whole value"
            ));
        }
        if text.chars().any(char::is_control) {
            return fault(
                "the key contains a control character; interpolate the value with key!, which escapes it".into(),
            );
        }
        Ok(Key(Arc::new(Inner { text: text.into(), template, hash: hash_of(text) })))
    }

    /// The whole key as a string, with the values in it.
    pub fn as_str(&self) -> &str {
        &self.0.text
    }

    /// The name that may be shown to anybody: the template if the key has one, else
    /// the key itself.
    pub fn label(&self) -> &str {
        if self.0.template.is_empty() { &self.0.text } else { self.0.template }
    }

    /// Whether this is a clone of the same key, with the same label.
    pub(crate) fn is_same(&self, other: &Key) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn hash(&self) -> u64 {
        self.0.hash
    }

    /// The same key with another label, for logs, errors and metrics.
    #[must_use]
    pub fn named(mut self, name: &'static str) -> Self {
        Arc::make_mut(&mut self.0).template = name;
        self
    }

    /// The key of a part: this key, a colon and the name of the part, which is
    /// escaped as a value. It has the label of this key.
    ///
    /// # Errors
    /// As [`Key::new`].
    #[doc(hidden)]
    pub fn part(&self, name: &str) -> Result<Self, Error> {
        let whole = KeyWriter::new(self.0.template).literal(&self.0.text).literal(":");
        whole.value("name", format_args!("{name}")).finish()
    }

    /// The template; an empty string for a key that was made from a string.
    #[doc(hidden)]
    pub fn template(&self) -> &'static str {
        self.0.template
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.is_same(other) || (self.0.hash == other.0.hash && self.0.text == other.0.text)
    }
}
impl Eq for Key {}
impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Key {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.text.cmp(&other.0.text)
    }
}
impl std::hash::Hash for Key {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.label())
    }
}

/// Something that a key can be made from: a [`Key`], the result of
/// [`key!`](crate::key!), or a string that needs no escaping.
///
/// If the key is not valid, `lock()` returns the error, so that the call chain needs
/// only one `?`.
pub trait IntoKey {
    /// Makes the key.
    ///
    /// # Errors
    /// As [`Key::new`].
    fn into_key(self) -> Result<Key, Error>;
}

impl IntoKey for Key {
    fn into_key(self) -> Result<Key, Error> {
        Ok(self)
    }
}
impl IntoKey for &Key {
    fn into_key(self) -> Result<Key, Error> {
        Ok(self.clone())
    }
}
impl IntoKey for Result<Key, Error> {
    fn into_key(self) -> Result<Key, Error> {
        self
    }
}
impl IntoKey for &str {
    fn into_key(self) -> Result<Key, Error> {
        Key::new(self)
    }
}
impl IntoKey for String {
    fn into_key(self) -> Result<Key, Error> {
        Key::new(self)
    }
}

/// Builds a key from a template. `key!` expands to calls of its methods.
#[doc(hidden)]
#[derive(Debug)]
pub struct KeyWriter {
    text: String,
    template: &'static str,
    /// The first placeholder whose value is empty.
    empty: Option<&'static str>,
}

impl KeyWriter {
    #[doc(hidden)]
    pub fn new(template: &'static str) -> Self {
        KeyWriter { text: String::with_capacity(48), template, empty: None }
    }

    #[doc(hidden)]
    pub fn literal(mut self, text: &str) -> Self {
        self.text.push_str(text);
        self
    }

    #[doc(hidden)]
    pub fn value(mut self, placeholder: &'static str, value: fmt::Arguments<'_>) -> Self {
        let before = self.text.len();
        // A value whose `Display` fails makes the key invalid.
        if Escape(&mut self.text).write_fmt(value).is_err() && self.text.len() <= MAX_KEY_BYTES {
            self.text.push('\u{0}');
        }
        // A text that is too long already takes nothing more.
        if self.text.len() == before && before <= MAX_KEY_BYTES {
            self.empty.get_or_insert(placeholder);
        }
        self
    }

    #[doc(hidden)]
    pub fn finish(self) -> Result<Key, Error> {
        match self.empty {
            None => Key::checked(&self.text, self.template),
            Some(placeholder) => Err(Error::new(ErrorKind::Invalid, Operation::Acquire)
                .with_key_label(self.template)
                .with_message(format!(
                    "the value of `{{{placeholder}}}` is empty, so that all callers without one would share a lock; check the value before you lock"
                ))),
        }
    }
}

/// Percent-escapes every character that has a meaning in a key or a backend.
struct Escape<'a>(&'a mut String);

impl Escape<'_> {
    fn keeps(c: char) -> bool {
        c.is_ascii_alphanumeric()
            || matches!(c, '_' | '-' | '.' | '@')
            || (!c.is_ascii() && !c.is_control())
    }
}

impl fmt::Write for Escape<'_> {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        for c in piece.chars() {
            if self.0.len() > MAX_KEY_BYTES {
                return Err(fmt::Error); // it is too long already; finish() reports that
            }
            if Self::keeps(c) {
                self.0.push(c);
            } else {
                let mut utf8 = [0; 4];
                for byte in c.encode_utf8(&mut utf8).bytes() {
                    write!(self.0, "%{byte:02X}")?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(value: &str) -> Result<Key, Error> {
        KeyWriter::new("user:{id}").literal("user:").value("id", format_args!("{value}")).finish()
    }

    #[test]
    fn values_cannot_forge_another_key() {
        assert_eq!(made("7").unwrap().as_str(), "user:7");
        assert_eq!(made("7:x{y}%").unwrap().as_str(), "user:7%3Ax%7By%7D%25");
        assert_eq!(made("a\0b\nc").unwrap().as_str(), "user:a%00b%0Ac");
        assert_eq!(made("näme-🎉").unwrap().as_str(), "user:näme-🎉");
        assert_eq!(made("\u{85}").unwrap().as_str(), "user:%C2%85");
    }

    #[test]
    fn an_empty_value_makes_no_key() {
        let two = |first: &str, second: &str| {
            let key = KeyWriter::new("{tenant}:{id}").value("tenant", format_args!("{first}"));
            key.literal(":").value("id", format_args!("{second}")).finish()
        };
        for (first, second, named) in [("", "7", "{tenant}"), ("a", "", "{id}")] {
            let error = two(first, second).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            let shown = error.to_string();
            assert!(shown.contains(&format!("`{named}` is empty")), "{shown}");
            assert!(shown.contains("{tenant}:{id}"), "{shown}");
        }
        let too_long = two(&"x".repeat(600), "7").unwrap_err().to_string();
        assert!(too_long.contains("longer than 512 bytes"), "{too_long}");
    }

    #[test]
    fn parts_cannot_forge_another_part() {
        let stock = made("7").unwrap();
        assert_eq!(stock.part("eu").unwrap().as_str(), "user:7:eu");
        let (inner, outer) = (stock.part("eu").unwrap(), stock.part("eu:1").unwrap());
        assert_ne!(inner.part("1").unwrap(), outer);
        assert_eq!(outer.label(), "user:{id}");
    }

    #[test]
    fn bad_keys_are_typed_errors() {
        for bad in ["", "a\nb", &"x".repeat(513)] {
            assert_eq!(Key::new(bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad:?}");
        }
        assert!(Key::new("x".repeat(512)).is_ok());
        assert_eq!(made(&"x".repeat(10_000)).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn debug_shows_the_template_only() {
        let key = made("secret@example.org").unwrap();
        assert_eq!(format!("{key:?}"), "Key(user:{id})");
        assert_eq!(format!("{:?}", Key::new("nightly").unwrap()), "Key(nightly)");
    }
}
