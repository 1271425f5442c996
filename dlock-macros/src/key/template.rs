//! The template of a key: `order:{order_id}`.

use proc_macro2::{Ident, Span};
use syn::parse::{Parse, ParseStream};
use syn::{Error, LitStr, Token};

use super::placeholder::Placeholder;
use super::validate::validate;

/// A template that follows the rules.
pub(crate) struct Template {
    pub(super) source: LitStr,
    pub(super) pieces: Vec<Piece>,
}

pub(super) enum Piece {
    Literal(String),
    Placeholder(Placeholder),
}

impl Template {
    pub(crate) fn new(source: LitStr) -> syn::Result<Self> {
        let pieces = split(&source.value(), source.span())
            .and_then(|pieces| validate(&pieces).map(|()| pieces))
            .map_err(|message| Error::new(source.span(), message))?;
        Ok(Template { source, pieces })
    }

    /// The variables that the template uses, in order: `req` for `{req.user.id}`.
    pub(crate) fn variables(&self) -> impl Iterator<Item = &Ident> {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Literal(_) => None,
            Piece::Placeholder(placeholder) => placeholder.variable(),
        })
    }
}

/// The arguments of `key!`: the template and nothing else.
impl Parse for Template {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        const RULE: &str = "key! needs exactly one string literal, with the names of the \
                            values in braces: write key!(\"order:{order_id}\")";
        let source: LitStr = input.parse().map_err(|error| Error::new(error.span(), RULE))?;
        input.parse::<Option<Token![,]>>()?;
        if input.is_empty() { Template::new(source) } else { Err(input.error(RULE)) }
    }
}

/// Splits the template into literals and placeholders.
fn split(template: &str, span: Span) -> Result<Vec<Piece>, String> {
    if let Some(c) = template.chars().find(|c| c.is_control()) {
        return Err(format!(
            "a key cannot contain control characters, but the template contains {c:?}: write a \
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
                .ok_or("the template has a `{` without its `}`: write `{name}` for a value, or `{{` for a brace")?;
            push_literal(&mut pieces, &mut literal);
            pieces.push(Piece::Placeholder(Placeholder::parse(inside, span)?));
            rest = after;
        } else {
            return Err(
                "the template has a `}` without its `{`: write `{name}` for a value, or `}}` for a brace".into()
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
