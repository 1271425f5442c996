//! The key of an annotated function.

use std::fmt;

use dlock::{Dlock, ErrorKind, Result, distributed_lock, key, testing};

#[distributed_lock(key = "a:{value}:b:{{x}}:{n:05}", client = dlock, guard = lock)]
async fn locked(dlock: &Dlock, value: &str, n: u32) -> Result<String> {
    let (text, by_hand) = (lock.key().as_str().to_owned(), key!("a:{value}:b:{{x}}:{n:05}")?);
    assert_eq!(text, by_hand.as_str());
    assert_eq!(lock.key().label(), "a:{value}:b:{{x}}:{n:05}");
    Ok(text)
}

#[tokio::test]
async fn every_value_is_escaped() {
    let dlock = testing::client();
    for (value, escaped) in [
        ("7", "7"),
        (":", "%3A"),
        ("{}", "%7B%7D"),
        ("%", "%25"),
        ("a\0b", "a%00b"),
        ("a\nb", "a%0Ab"),
        ("🎉", "🎉"),
    ] {
        let text = locked(&dlock, value, 42).await.unwrap();
        assert_eq!(text, format!("a:{escaped}:b:{{x}}:00042"));
    }
    let error = locked(&dlock, "", 42).await.unwrap_err(); // or all empty ids share a lock
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("`{value}` is empty"), "{error}");
    let error = locked(&dlock, &"x".repeat(10 * 1024), 42).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(!error.to_string().contains("xxx"), "{error}");
    assert!(error.to_string().contains("a:{value}"), "{error}");
}

struct Event {
    r#match: u32,
}

#[distributed_lock(key = "{type}:{event.match}:{id}", client = dlock, guard = lock)]
async fn keywords(dlock: &Dlock, r#type: &str, event: Event, r#id: u32) -> Result<String> {
    assert_eq!(lock.key(), &key!("{type}:{event.match}:{id}")?);
    Ok(lock.key().as_str().to_owned())
}

#[distributed_lock(key = { let up = name.to_uppercase(); key!("user:{up}") }, client = dlock, guard = lock)]
async fn computed(dlock: &Dlock, name: &str) -> Result<String> {
    Ok(lock.key().as_str().to_owned())
}

#[tokio::test]
async fn keywords_and_computed_values() {
    let dlock = testing::client();
    assert_eq!(keywords(&dlock, "a", Event { r#match: 1 }, 7).await.unwrap(), "a:1:7");
    assert_eq!(computed(&dlock, "ann").await.unwrap(), "user:ANN");
}

/// Counts how often it is shown, and can be neither cloned nor copied.
struct Id<'a>(&'a std::cell::Cell<u32>);

impl fmt::Display for Id<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.set(self.0.get() + 1);
        f.write_str("id")
    }
}

#[distributed_lock(key = "id:{id}", client = dlock)]
async fn consumes(dlock: &Dlock, id: Id<'_>) -> Result<u32> {
    let Id(shown) = id; // moved: the key does not borrow it any more
    Ok(shown.get())
}

#[tokio::test]
async fn values_are_borrowed_and_shown_once() {
    let shown = std::cell::Cell::new(0);
    assert_eq!(consumes(&testing::client(), Id(&shown)).await.unwrap(), 1);
}
