//! The template of a key: `order:{order_id}`.
//!
//! A template that passes here makes different keys from values that print
//! differently: the literal text between two values contains a character that an
//! escaped value never does, so a key can be cut back in one way only.

use proc_macro2::{Ident, Span, TokenStream};
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::{Error, Expr, LitStr, Token};

/// `MAX_KEY_BYTES` of dlock-core, which this crate cannot depend on.
const MAX_LITERAL_BYTES: usize = 512;

/// A template that keeps the rules.
pub(crate) struct Template {
    source: LitStr,
    pieces: Vec<Piece>,
}

enum Piece {
    Literal(String),
    Value(Value),
}

/// `{req.user.id:05}`
struct Value {
    /// `req.user.id`, as written.
    text: String,
    /// The same as code, at the span of the literal.
    expr: Expr,
    /// `05`
    spec: String,
}

impl Template {
    pub(crate) fn new(source: LitStr) -> syn::Result<Self> {
        let pieces = split(&source.value(), source.span())
            .and_then(checked)
            .map_err(|fault| Error::new(source.span(), fault))?;
        Ok(Template { source, pieces })
    }

    /// The variables whose values or fields are interpolated, in order: `req`
    /// for `{req.user.id}`.
    pub(crate) fn names(&self) -> impl Iterator<Item = &Ident> {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Literal(_) => None,
            Piece::Value(value) => root(&value.expr),
        })
    }

    /// An expression of type `Result<Key, Error>`.
    pub(crate) fn expand(&self, core: &TokenStream) -> TokenStream {
        let label = match self.names().next() {
            Some(_) => self.source.value(),
            // Without values there is nothing to hide: the text is the label.
            None => String::new(),
        };
        let calls = self.pieces.iter().map(|piece| match piece {
            Piece::Literal(text) => quote!(.literal(#text)),
            Piece::Value(Value { expr, spec, .. }) => {
                let format = if spec.is_empty() { "{}".to_owned() } else { format!("{{:{spec}}}") };
                quote!(.value(::core::format_args!(#format, #expr)))
            }
        });
        // The `let` ends the life of the format arguments, which are not Send:
        // in `lock(key!("order:{id}")).await` they would live across the await.
        quote! {{
            let key = #core::__private::KeyWriter::new(#label) #(#calls)* .finish();
            key
        }}
    }
}

/// The arguments of `key!`: the template and nothing else.
impl Parse for Template {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        const RULE: &str = "key! takes one string literal, with the names of the values inside \
                            its braces: write key!(\"order:{order_id}\")";
        let source: LitStr = input.parse().map_err(|error| Error::new(error.span(), RULE))?;
        input.parse::<Option<Token![,]>>()?;
        if input.is_empty() { Template::new(source) } else { Err(input.error(RULE)) }
    }
}

impl Value {
    /// Reads what is between the braces. The tokens get the span of the literal:
    /// there the names are looked up and errors about them are shown.
    fn parse(inside: &str, span: Span) -> Result<Self, String> {
        let (text, spec) = inside.split_once(':').unwrap_or((inside, ""));
        let text = text.trim();
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(format!(
                "`{{{inside}}}` names no value: write the name of the value inside the braces, \
                 such as `{{order_id}}`"
            ));
        }
        let expr = field_path(text, span).filter(|_| !is_path_rest(spec)).ok_or_else(|| {
            format!(
                "`{{{inside}}}` is neither a name nor a field path such as `{{order.id}}`: bind \
                 the value to a variable first and write the name of that"
            )
        })?;
        if spec.contains('$') || spec.contains(".*") {
            return Err(format!(
                "the width or precision in `{{{inside}}}` is an argument, which a key template \
                 does not have: write a number, as in `{{{text}:08}}` or `{{{text}:.2}}`"
            ));
        }
        if !is_specifier(spec) {
            return Err(format!(
                "`{spec}` in `{{{inside}}}` is no format specifier: write `{{{text}}}`, or a \
                 specifier that format! knows, such as `{{{text}:08}}` or `{{{text}:?}}`"
            ));
        }
        Ok(Value { text: text.to_owned(), expr, spec: spec.to_owned() })
    }
}

fn split(template: &str, span: Span) -> Result<Vec<Piece>, String> {
    if let Some(c) = template.chars().find(|c| c.is_control()) {
        return Err(format!(
            "the template contains the control character {c:?}, which no key may: write a \
             visible separator such as `:`"
        ));
    }
    let mut pieces = Vec::new();
    let mut literal = String::new();
    let mut rest = template;
    while let Some(brace) = rest.find(['{', '}']) {
        literal.push_str(&rest[..brace]);
        rest = &rest[brace..];
        if let Some(after) = rest.strip_prefix("{{").or_else(|| rest.strip_prefix("}}")) {
            literal.push_str(&rest[..1]);
            rest = after;
        } else if let Some(opened) = rest.strip_prefix('{') {
            let (inside, after) = opened
                .split_once('}')
                .filter(|(inside, _)| !inside.contains('{'))
                .ok_or("a `{` is not closed: write `{name}` for a value or `{{` for a brace")?;
            push_literal(&mut pieces, &mut literal);
            pieces.push(Piece::Value(Value::parse(inside, span)?));
            rest = after;
        } else {
            return Err(
                "a `}` closes nothing: write `{name}` for a value or `}}` for a brace".into()
            );
        }
    }
    literal.push_str(rest);
    push_literal(&mut pieces, &mut literal);
    Ok(pieces)
}

fn push_literal(pieces: &mut Vec<Piece>, literal: &mut String) {
    if !literal.is_empty() {
        pieces.push(Piece::Literal(std::mem::take(literal)));
    }
}

fn checked(pieces: Vec<Piece>) -> Result<Vec<Piece>, String> {
    if pieces.is_empty() {
        return Err(
            "the template is empty: give the lock a name, such as `order:{order_id}`".into()
        );
    }
    let mut bytes = 0;
    let mut before: Option<&Value> = None;
    let mut separated = false;
    for piece in &pieces {
        match piece {
            Piece::Literal(text) => {
                bytes += text.len();
                separated |= text.contains(separates);
            }
            Piece::Value(value) => {
                if let Some(Value { text: a, .. }) = before
                    && !separated
                {
                    let b = &value.text;
                    return Err(format!(
                        "nothing separates `{a}` from `{b}`: (\"1\", \"23\") and (\"12\", \"3\") \
                         would make the same key; put a `:` between them (letters, digits, \
                         `_ - . @ %` and non-ASCII characters do not separate, as a value may \
                         contain them)"
                    ));
                }
                before = Some(value);
                separated = false;
            }
        }
    }
    if bytes > MAX_LITERAL_BYTES {
        return Err(format!(
            "the literal text of the template has {bytes} bytes, but a key at most \
             {MAX_LITERAL_BYTES}: write a shorter one"
        ));
    }
    Ok(pieces)
}

/// Whether the character never occurs in an escaped value. `%` does, as the
/// start of every escape: with `{a}%{b}`, both ("%", "3A") and ("", "25:") would
/// make `%25%3A`.
fn separates(c: char) -> bool {
    c.is_ascii() && !c.is_ascii_alphanumeric() && !matches!(c, '_' | '-' | '.' | '@' | '%')
}

/// `name`, `self.tenant`, `pair.0`; anything else is none.
fn field_path(text: &str, span: Span) -> Option<Expr> {
    // Only plain words go to the lexer of rustc: it reports what it cannot read,
    // an open quote for instance, besides the error it returns.
    let is_word = |part: &str| {
        let part = part.strip_prefix("r#").unwrap_or(part);
        !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || c == '_')
    };
    if !text.split('.').all(is_word) {
        return None;
    }
    let expr = LitStr::new(text, span).parse().ok()?;
    root(&expr)?;
    Some(expr)
}

/// The variable of a name or field path.
fn root(expr: &Expr) -> Option<&Ident> {
    match expr {
        Expr::Path(path) => path.path.get_ident(),
        Expr::Field(field) => root(&field.base),
        _ => None,
    }
}

/// Whether what follows the first `:` is the rest of a path, as in `{Kind::Order}`,
/// and not a specifier that fills with colons, as in `{n::>8}`.
fn is_path_rest(spec: &str) -> bool {
    spec.strip_prefix(':').is_some_and(|rest| !rest.starts_with(['<', '^', '>']))
}

/// Whether `format!` knows the specifier:
/// `[[fill]align][sign]['#'][width]['.' precision][type]`. Its own complaint about
/// one that it does not know would point beside the literal.
fn is_specifier(spec: &str) -> bool {
    const ALIGN: [char; 3] = ['<', '^', '>'];
    let mut chars = spec.chars();
    chars.next();
    let rest = if chars.as_str().starts_with(ALIGN) { chars.as_str() } else { spec };
    let rest = rest.strip_prefix(ALIGN).unwrap_or(rest);
    let rest = rest.strip_prefix(['+', '-']).unwrap_or(rest);
    let rest = rest.strip_prefix('#').unwrap_or(rest);
    let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit());
    let kind = match rest.strip_prefix('.') {
        Some(rest) => rest.trim_start_matches(|c: char| c.is_ascii_digit()),
        None => rest,
    };
    matches!(kind, "" | "?" | "x?" | "X?" | "x" | "X" | "o" | "b" | "e" | "E" | "p")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(text: &str) -> syn::Result<Template> {
        Template::new(LitStr::new(text, Span::call_site()))
    }

    /// The pieces, one word each: literals quoted, values as `text|spec`.
    fn pieces(text: &str) -> String {
        let words: Vec<String> = template(text)
            .unwrap()
            .pieces
            .iter()
            .map(|piece| match piece {
                Piece::Literal(text) => format!("{text:?}"),
                Piece::Value(value) => format!("{}|{}", value.text, value.spec),
            })
            .collect();
        words.join(" ")
    }

    fn fault(text: &str) -> String {
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
    fn specifiers() {
        assert_eq!(pieces("{n:05}:{x:>8}:{id:x}"), r#"n|05 ":" x|>8 ":" id|x"#);
        assert_eq!(pieces("{mode:?}:{n::>8}:{n:*^9.2}"), r#"mode|? ":" n|:>8 ":" n|*^9.2"#);
        for spec in ["{n:w$}", "{n:>w$.2}", "{x:.p$}", "{x:.*}"] {
            assert!(fault(spec).contains("write a number"), "{spec}");
        }
        for spec in
            ["", "5", "<5", "x<5", "<<", "🎉^+#08.3", "-", "#?", "02x?", ".2e", "#010b", "p"]
        {
            assert!(is_specifier(spec), "{spec}");
        }
        for spec in ["id", "5 5", "x>y", "i🎉", "??", "y", " ", "5#", "<5<"] {
            let fault = fault(&format!("{{n:{spec}}}"));
            assert!(fault.contains("is no format specifier"), "{spec}: {fault}");
        }
    }

    #[test]
    fn braces() {
        assert_eq!(pieces("a{{b}}c"), r#""a{b}c""#);
        assert_eq!(pieces("{{{x}}}"), r#""{" x| "}""#);
        assert_eq!(pieces("{a}}}{{{b}"), r#"a| "}{" b|"#);
        for open in ["{", "a{", "{x", "{a{b}}", "{x:{w}}", "{{{x"] {
            assert!(fault(open).contains("`{` is not closed"), "{open}");
        }
        for lone in ["}", "a}b", "{x}}", "{{x}"] {
            assert!(fault(lone).contains("`}` closes nothing"), "{lone}");
        }
    }

    #[test]
    fn values_without_a_name() {
        for bare in ["{}", "{0}", "{:?}", "{ }", "{12:05}"] {
            assert!(fault(bare).contains("write the name of the value"), "{bare}");
        }
    }

    #[test]
    fn expressions() {
        let code = r#"a + b|f(x)|x.len()|x[0]|*x|&x|(x)|x?|-1|"x"|f("|x.await|Kind::Order|a::b"#;
        let stray = "return|true|type|_|a b|a/**/|a.|.a|a..b|0.a|1.0|a,b|a=b|x!|'a";
        for text in code.split('|').chain(stray.split('|')) {
            let fault = fault(&format!("k:{{{text}}}"));
            assert!(fault.contains("bind the value to a variable first"), "{text}: {fault}");
            assert!(fault.contains(text), "{text}: {fault}");
        }
    }

    #[test]
    fn values_are_separated() {
        for between in [":", "/", " ", "a:b", "}}", "{{", "%:", "-|-", "+", "~", "\""] {
            template(&format!("{{a}}{between}{{b}}")).unwrap();
        }
        for between in ["", "x", "7", "-", "_", ".", "@", "%", "%3A", "→", "ä-"] {
            let fault = fault(&format!("pair:{{a.x}}{between}{{b}}:{{c}}"));
            assert!(fault.contains("nothing separates `a.x` from `b`"), "{between}: {fault}");
        }
        assert!(fault("{a}:{b}{c}").contains("`b` from `c`"));
    }

    #[test]
    fn literal_text_is_bounded() {
        assert!(fault("").contains("is empty"));
        template(&"x".repeat(512)).unwrap();
        template(&"{{".repeat(512)).unwrap();
        template(&format!("{}:{{{}}}", "x".repeat(511), "y".repeat(600))).unwrap();
        assert!(fault(&"x".repeat(513)).contains("513 bytes"));
        let halves = format!("{}:{{v}}{}", "x".repeat(256), "ä".repeat(128));
        assert!(fault(&halves).contains("513 bytes"));
    }

    #[test]
    fn control_characters() {
        for (text, shown) in [("a\nb", "'\\n'"), ("a\0", "'\\0'"), ("\u{85}", "\\u{85}")] {
            assert!(fault(text).contains(shown), "{shown}");
        }
        // Not part of the key, but of the label that is logged.
        assert!(fault("{x:\n>5}").contains("control character"));
    }

    #[test]
    fn roots_are_named() {
        let template = template("a:{x}:{self.y.0}:{x.z:?}").unwrap();
        let names: Vec<String> = template.names().map(Ident::to_string).collect();
        assert_eq!(names, ["x", "self", "x"]);
    }

    #[test]
    fn expansion() {
        let expand = |text| template(text).unwrap().expand(&quote!(::dlock)).to_string();
        let wanted = quote! {{
            let key = ::dlock::__private::KeyWriter::new("order:{order_id}:{n:05}")
                .literal("order:")
                .value(::core::format_args!("{}", order_id))
                .literal(":")
                .value(::core::format_args!("{:05}", n))
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
}
