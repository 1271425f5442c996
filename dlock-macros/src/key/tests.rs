//! Tests of the template: what is accepted, what is refused, what it expands to.

use proc_macro2::{Ident, Span};
use quote::quote;
use syn::LitStr;

use super::placeholder::is_specifier;
use super::template::{Piece, Template};
use crate::paths::DlockPaths;

fn template(text: &str) -> syn::Result<Template> {
    Template::new(LitStr::new(text, Span::call_site()))
}

/// The pieces with spaces between: literals quoted, placeholders as `text|spec`.
fn pieces(text: &str) -> String {
    let pieces: Vec<String> = template(text)
        .unwrap()
        .pieces
        .iter()
        .map(|piece| match piece {
            Piece::Literal(text) => format!("{text:?}"),
            Piece::Placeholder(value) => format!("{}|{}", value.text, value.spec),
        })
        .collect();
    pieces.join(" ")
}

fn error(text: &str) -> String {
    match template(text) {
        Ok(_) => panic!("{text:?} was accepted"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn names_and_fields() {
    assert_eq!(pieces("nightly"), r#""nightly""#);
    assert_eq!(pieces("order:{order_id}"), r#""order:" order_id|"#);
    assert_eq!(pieces("{self.tenant}/{req.user.id}"), r#"self.tenant| "/" req.user.id|"#);
    assert_eq!(pieces("{pair.0}:{nested.0.1}"), r#"pair.0| ":" nested.0.1|"#);
    assert_eq!(pieces("{ spaced }:{r#type}:{größe}"), r#"spaced| ":" r#type| ":" größe|"#);
}

#[test]
fn keywords_are_raw_identifiers() {
    let template = template("{type}:{req.match.0:?}:{r#ref}").unwrap();
    let variables: Vec<String> = template.variables().map(Ident::to_string).collect();
    assert_eq!(variables, ["r#type", "req", "r#ref"]);
    assert!(error("{type}-{ref}").contains("nothing separates `type` from `ref`"));
}

#[test]
fn specifiers() {
    assert_eq!(pieces("{n:05}:{x:>8}:{id:x}"), r#"n|05 ":" x|>8 ":" id|x"#);
    assert_eq!(pieces("{mode:?}:{n::>8}:{n:*^9.2}"), r#"mode|? ":" n|:>8 ":" n|*^9.2"#);
    for spec in ["{n:w$}", "{n:>w$.2}", "{x:.p$}", "{x:.*}"] {
        assert!(error(spec).contains("write a number"), "{spec}");
    }
    for spec in ["", "5", "<5", "x<5", "<<", "🎉^+#08.3", "-", "#?", "02x?", ".2e", "#010b", "p"]
    {
        assert!(is_specifier(spec), "{spec}");
    }
    for spec in ["id", "5 5", "x>y", "i🎉", "??", "y", " ", "5#", "<5<"] {
        let error = error(&format!("{{n:{spec}}}"));
        assert!(error.contains("is not a format specifier"), "{spec}: {error}");
    }
}

#[test]
fn braces() {
    assert_eq!(pieces("a{{b}}c"), r#""a{b}c""#);
    assert_eq!(pieces("{{{x}}}"), r#""{" x| "}""#);
    assert_eq!(pieces("{a}}}{{{b}"), r#"a| "}{" b|"#);
    for open in ["{", "a{", "{x", "{a{b}}", "{x:{w}}", "{{{x"] {
        assert!(error(open).contains("a `{` without its `}`"), "{open}");
    }
    for lone in ["}", "a}b", "{x}}", "{{x}"] {
        assert!(error(lone).contains("a `}` without its `{`"), "{lone}");
    }
}

#[test]
fn values_without_a_name() {
    for bare in ["{}", "{0}", "{:?}", "{ }", "{12:05}"] {
        assert!(error(bare).contains("write the name of the value"), "{bare}");
    }
}

#[test]
fn expressions() {
    let code = r#"a + b|f(x)|x.len()|x[0]|*x|&x|(x)|x?|-1|"x"|f("|x.await|Kind::Order|a::b"#;
    let stray = "await|_|a b|a/**/|a.|.a|a..b|0.a|1.0|a,b|a=b|x!|'a";
    for text in code.split('|').chain(stray.split('|')) {
        let error = error(&format!("k:{{{text}}}"));
        assert!(error.contains("assign the value to a variable first"), "{text}: {error}");
        assert!(error.contains(&format!("key = {{ let value = {text}; key!(")), "{text}: {error}");
    }
    assert!(error("k:{x.len():05}").contains("let value = x.len();"));
}

#[test]
fn values_are_separated() {
    for between in [":", "/", " ", "a:b", "}}", "{{", "%:", "-|-", "+", "~", "\""] {
        template(&format!("{{a}}{between}{{b}}")).unwrap();
    }
    for between in ["", "x", "7", "-", "_", ".", "@", "%", "%3A", "→", "ä-"] {
        let error = error(&format!("pair:{{a.x}}{between}{{b}}:{{c}}"));
        assert!(error.contains("nothing separates `a.x` from `b`"), "{between}: {error}");
    }
    assert!(error("{a}:{b}{c}").contains("`b` from `c`"));
}

#[test]
fn literal_text_is_bounded() {
    assert!(error("").contains("is empty"));
    template(&"x".repeat(512)).unwrap();
    template(&"{{".repeat(512)).unwrap();
    template(&format!("{}:{{{}}}", "x".repeat(511), "y".repeat(600))).unwrap();
    assert!(error(&"x".repeat(513)).contains("513 bytes"));
    let halves = format!("{}:{{v}}{}", "x".repeat(256), "ä".repeat(128));
    assert!(error(&halves).contains("513 bytes"));
}

#[test]
fn control_characters() {
    for (text, shown) in [("a\nb", "'\\n'"), ("a\0", "'\\0'"), ("\u{85}", "\\u{85}")] {
        assert!(error(text).contains(shown), "{shown}");
    }
    // The specifier is not part of the key, but of the label that is logged.
    assert!(error("{x:\n>5}").contains("control character"));
}

#[test]
fn variables_are_listed() {
    let template = template("a:{x}:{self.y.0}:{x.z:?}").unwrap();
    let variables: Vec<String> = template.variables().map(Ident::to_string).collect();
    assert_eq!(variables, ["x", "self", "x"]);
}

#[test]
fn expansion() {
    let expand =
        |text| template(text).unwrap().expand(&DlockPaths::below(quote!(::dlock))).to_string();
    let wanted = quote! {{
        let key = ::dlock::__private::KeyWriter::new("order:{order_id}:{n:05}")
            .literal("order:")
            .value("order_id", ::core::format_args!("{}", order_id))
            .literal(":")
            .value("n", ::core::format_args!("{:05}", n))
            .finish();
        key
    }};
    assert_eq!(expand("order:{order_id}:{n:05}"), wanted.to_string());

    let wanted = quote! {{
        let key = ::dlock::__private::KeyWriter::new("").literal("a{b}").finish();
        key
    }};
    assert_eq!(expand("a{{b}}"), wanted.to_string());
}

#[test]
fn one_literal_and_nothing_else() {
    for good in [r#""a:{x}""#, r##"r#"a"{x}"#"##, r#""a","#] {
        assert!(syn::parse_str::<Template>(good).is_ok(), "{good}");
    }
    for bad in ["", "x", "7", r#"b"a""#, r#"c"a""#, r#""a", b"#, r#""a" b"#, r#""a", x = 1"#] {
        match syn::parse_str::<Template>(bad) {
            Ok(_) => panic!("{bad} was accepted"),
            Err(error) => assert!(error.to_string().contains("one string literal"), "{bad}"),
        }
    }
}
