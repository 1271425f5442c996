//! The keys that `key!` makes, and its errors at run time.

use std::cell::Cell;
use std::fmt;

use dlock::{ErrorKind, Key, Result, key};

fn text(key: Result<Key>) -> String {
    key.expect("a valid key").as_str().to_owned()
}

#[test]
fn values_are_escaped() {
    let made = |value: &str| text(key!("user:{value}"));
    assert_eq!(made("7"), "user:7");
    assert_eq!(made("7:admin"), "user:7%3Aadmin");
    assert_eq!(made("{7}"), "user:%7B7%7D");
    assert_eq!(made("%3A"), "user:%253A");
    assert_eq!(made("a\0b"), "user:a%00b");
    assert_eq!(made("a\nb"), "user:a%0Ab");
    assert_eq!(made("a b/c"), "user:a%20b%2Fc");
    assert_eq!(made("🎉"), "user:🎉");
    assert_eq!(made("me_7-x.y@example.org"), "user:me_7-x.y@example.org");
}

#[test]
fn different_values_make_different_keys() {
    let values = [":", "::", "a", "a:", ":a", "a:a", "%", "%3A", "3A", "25", "%25", "{a}"];
    let mut seen = std::collections::HashSet::new();
    for a in values {
        for b in values {
            assert!(seen.insert(text(key!("pair:{a}:{b}"))), "({a:?}, {b:?})");
        }
    }
}

#[test]
fn a_long_value_is_an_error() {
    let value = "x".repeat(10_240);
    let error = key!("blob:{value}").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("blob:{value}"), "{error}");
    assert!(!error.to_string().contains("xxx"), "{error}");
}

#[test]
fn an_empty_value_is_an_error() {
    let (tenant, id) = ("a", String::new());
    let error = key!("order:{tenant}:{id}").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("`{id}` is empty"), "{error}");
    assert_eq!(text(key!("order:{tenant}:{id:?}")), "order:a:%22%22", "it is visible");
}

#[test]
fn the_label_is_the_template_or_the_literal_text() {
    let user = "secret";
    assert_eq!(key!("user:{user:?}").unwrap().label(), "user:{user:?}");
    assert_eq!(key!("nightly").unwrap().label(), "nightly");
    assert_eq!(key!("a{{b}}").unwrap().label(), "a{b}");
}

#[test]
fn field_paths() {
    struct User {
        id: u32,
        r#type: &'static str,
    }
    struct Req {
        user: User,
    }
    let req = Req { user: User { id: 7, r#type: "guest" } };
    let pair = ("a", (1, "b"));
    assert_eq!(text(key!("u:{req.user.id}:{req.user.r#type}")), "u:7:guest");
    assert_eq!(text(key!("p:{pair.0}:{pair.1.1}")), "p:a:b");
}

#[test]
fn format_specifiers() {
    let (n, id, word) = (42, 255, "ab");
    let mode = Some(1);
    assert_eq!(text(key!("n:{n:05}")), "n:00042");
    assert_eq!(text(key!("n:{id:x}:{id:#06X}")), "n:ff:0x00FF");
    assert_eq!(text(key!("n:{word:>4}:{word:*<4}")), "n:%20%20ab:ab%2A%2A");
    assert_eq!(text(key!("n:{word::^4}")), "n:%3Aab%3A");
    assert_eq!(text(key!("n:{mode:?}:{word:?}")), "n:Some%281%29:%22ab%22");
    assert_eq!(text(key!("n:{ n :05}")), "n:00042");
}

#[test]
fn literals() {
    let x = 1;
    assert_eq!(text(key!("{{{x}}}")), "{1}");
    assert_eq!(text(key!(r"a\b:{x}")), r"a\b:1");
    assert_eq!(text(key!(r#"say "{x}""#)), r#"say "1""#);
    assert_eq!(text(key!("größe:\u{1F389}:{x}",)), "größe:🎉:1");
    assert_eq!(text(key!("{x}")), "1");
}

#[test]
fn values_are_borrowed() {
    struct Owned {
        name: String,
    }
    let owned = Owned { name: "a".to_owned() };
    let name = String::from("b");
    let changed = &mut String::from("c");
    assert_eq!(text(key!("k:{owned.name}:{name}:{changed}")), "k:a:b:c");
    changed.push('d');
    assert_eq!((owned.name, name, changed.as_str()), ("a".into(), "b".into(), "cd"));
}

#[test]
fn values_are_shown_once_and_in_order() {
    struct Counted<'a>(&'a Cell<u32>);
    impl fmt::Display for Counted<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.set(self.0.get() + 1);
            write!(f, "{}", self.0.get())
        }
    }
    let count = Cell::new(0);
    let (first, second) = (Counted(&count), Counted(&count));
    assert_eq!(text(key!("k:{first}:{second}")), "k:1:2");
    assert_eq!(count.get(), 2);
}

#[test]
fn a_display_that_fails_is_an_error() {
    struct Broken;
    impl fmt::Display for Broken {
        fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
            Err(fmt::Error)
        }
    }
    let broken = Broken;
    assert_eq!(key!("k:{broken}").unwrap_err().kind(), ErrorKind::Invalid);
}

struct Shop {
    tenant: String,
}

impl Shop {
    const KIND: &'static str = "shop";

    fn lock_name(&self, order: u32) -> Result<Key> {
        let kind = Self::KIND;
        key!("{kind}:{self.tenant}:{order}")
    }

    fn whole(&self) -> Result<Key> {
        key!("shop:{self}")
    }
}

impl fmt::Display for Shop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.tenant)
    }
}

#[test]
fn inside_a_method() {
    let shop = Shop { tenant: "a/b".to_owned() };
    assert_eq!(text(shop.lock_name(7)), "shop:a%2Fb:7");
    assert_eq!(text(shop.whole()), "shop:a%2Fb");
}

#[test]
fn names_are_found_where_the_literal_stands() {
    const LIMIT: u32 = 9;
    // A literal of the caller sees the caller's variables, a literal of the macro the
    // macro's variables.
    macro_rules! passed {
        ($template:literal) => {{
            let id = "macro";
            let own = key!("own:{id}");
            (text(key!($template)), text(own))
        }};
    }
    let id = "caller";
    assert_eq!(passed!("k:{id}"), ("k:caller".to_owned(), "own:macro".to_owned()));
    assert_eq!(text(key!("k:{LIMIT}")), "k:9");
    // The code that `key!` emits has a variable of this name too.
    let key = "mine";
    assert_eq!(text(key!("k:{key}")), "k:mine");
}

#[test]
fn a_future_that_makes_a_key_is_send() {
    async fn lock(key: Result<Key>) -> Result<Key> {
        key
    }
    fn is_send(_: impl Send) {}
    is_send(async {
        let id = 7;
        lock(key!("order:{id}")).await
    });
}
