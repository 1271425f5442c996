//! A placeholder of a template: `{order_id}`, `{req.user.id:05}`.

use proc_macro2::{Ident, Span};
use syn::{Expr, LitStr};

/// A placeholder for a value, such as `{req.user.id:05}`.
pub(super) struct Placeholder {
    /// The value as it is written: `req.user.id`.
    pub(super) text: String,
    /// The value as code, at the span of the literal.
    pub(super) expr: Expr,
    /// The format specifier: `05`.
    pub(super) spec: String,
}

impl Placeholder {
    /// Parses what is between the braces. The tokens get the span of the literal:
    /// there rustc looks the names up and shows errors about them.
    pub(super) fn parse(inside: &str, span: Span) -> Result<Self, String> {
        let (text, spec) = inside.split_once(':').unwrap_or((inside, ""));
        let text = text.trim();
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(format!(
                "`{{{inside}}}` does not name a value: write the name of the value inside the braces, \
                 such as `{{order_id}}`"
            ));
        }
        let expr = field_path(text, span).filter(|_| !is_path_rest(spec)).ok_or_else(|| {
            let code = if is_path_rest(spec) { inside } else { text };
            format!(
                "`{{{inside}}}` is neither a name nor a field path such as `{{order.id}}`: assign \
                 the value to a variable first, and write the name of the variable. In an \
                 attribute, write key = {{ let value = {code}; key!(\"order:{{value}}\") }}"
            )
        })?;
        if spec.contains('$') || spec.contains(".*") {
            return Err(format!(
                "the width or precision in `{{{inside}}}` cannot be an argument: write a \
                 number, as in `{{{text}:08}}` or `{{{text}:.2}}`"
            ));
        }
        if !is_specifier(spec) {
            return Err(format!(
                "`{spec}` in `{{{inside}}}` is not a format specifier: write `{{{text}}}`, or a \
                 specifier that format! knows, such as `{{{text}:08}}` or `{{{text}:?}}`"
            ));
        }
        Ok(Placeholder { text: text.to_owned(), expr, spec: spec.to_owned() })
    }

    /// The variable that the value is, or is a field of.
    pub(super) fn variable(&self) -> Option<&Ident> {
        variable(&self.expr)
    }
}

/// Parses a name or a field path: `name`, `self.tenant`, `pair.0`. A keyword names the
/// raw identifier, as in `format!`: `{type}` is `r#type`.
fn field_path(text: &str, span: Span) -> Option<Expr> {
    // Only plain words go to the lexer of rustc: besides returning an error it
    // reports what it cannot read, for instance an open quote.
    let is_word = |part: &str| {
        let part = part.strip_prefix("r#").unwrap_or(part);
        !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || c == '_')
    };
    if !text.split('.').all(is_word) {
        return None;
    }
    let raw = |part: &str| match is_keyword(part) {
        true => format!("r#{part}"),
        false => part.to_owned(),
    };
    let text: Vec<String> = text.split('.').map(raw).collect();
    let expr = LitStr::new(&text.join("."), span).parse().ok()?;
    variable(&expr)?;
    Some(expr)
}

/// Whether the word is a name only as a raw identifier. `self` is a name already; the
/// others that have no raw form are no names at all, and `x.await` is an expression.
fn is_keyword(word: &str) -> bool {
    let has_raw_form = !matches!(word, "self" | "Self" | "super" | "crate" | "await" | "_");
    let starts_name = word.starts_with(|c: char| c.is_alphabetic());
    has_raw_form && starts_name && syn::parse_str::<Ident>(word).is_err()
}

/// The variable of a name or field path.
fn variable(expr: &Expr) -> Option<&Ident> {
    match expr {
        Expr::Path(path) => path.path.get_ident(),
        Expr::Field(field) => variable(&field.base),
        _ => None,
    }
}

/// Whether what follows the first `:` is the rest of a path, as in `{Kind::Order}`,
/// and not a specifier that fills with colons, as in `{n::>8}`.
fn is_path_rest(spec: &str) -> bool {
    spec.strip_prefix(':').is_some_and(|rest| !rest.starts_with(['<', '^', '>']))
}

/// Whether `format!` knows the specifier:
/// `[[fill]align][sign]['#'][width]['.' precision][type]`. Its own error about an
/// unknown one would not point at the literal.
pub(super) fn is_specifier(spec: &str) -> bool {
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
