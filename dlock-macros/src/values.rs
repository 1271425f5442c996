//! What the value of an option can be.

use proc_macro2::{Ident, Span, TokenStream};
use quote::quote;
use syn::spanned::Spanned as _;
use syn::{Error, Expr, ExprLit, ExprPath, Lit, LitStr, Path};

use crate::args::{Args, Faults, Given, nearest};
use crate::template::Template;

pub(crate) enum KeySource {
    Template(Template),
    Expr(Expr),
}

pub(crate) fn expr(
    args: &mut Args,
    name: &str,
    example: &str,
    faults: &mut Faults,
) -> Option<Expr> {
    let given = args.take(name)?;
    faults.note(given.expr(&format!("write {example}")))
}

/// The path that `crate = ..` says, else this one.
pub(crate) fn crate_path(args: &mut Args, found: TokenStream, faults: &mut Faults) -> TokenStream {
    let Some(given) = args.take("crate") else { return found };
    let path = given.expr("write crate = dlock").and_then(|value| match value {
        Expr::Path(ExprPath { path, .. }) => Ok(path),
        value => match text(&value) {
            Some(text) => text.parse::<Path>(),
            None => Err(Error::new(value.span(), "`crate` takes a path: write crate = dlock")),
        },
    });
    faults.note(path).map_or(found, |path| quote!(#path))
}

impl KeySource {
    /// The key that is needed, if it is the only one.
    pub(crate) fn needed(
        key: Option<Given>,
        args: &Args,
        names: &[Ident],
        faults: &mut Faults,
    ) -> Option<Self> {
        let Some(key) = key else {
            if args.complete {
                faults.add(
                    Span::call_site(),
                    "what is to be locked? Write key = \"order:{order_id}\", with the names of \
                     arguments in braces",
                );
            }
            return None;
        };
        let key = faults.note(key.expr("write key = \"order:{order_id}\""))?;
        key_source(key, names, faults)
    }

    pub(crate) fn expand(&self, core: &TokenStream) -> TokenStream {
        match self {
            KeySource::Template(template) => template.expand(core),
            KeySource::Expr(expr) => quote!(#expr),
        }
    }
}

pub(crate) fn key_source(expr: Expr, names: &[Ident], faults: &mut Faults) -> Option<KeySource> {
    let Some(literal) = text(&expr) else { return Some(KeySource::Expr(expr)) };
    let template = faults.note(Template::new(literal.clone()))?;
    let mut known = true;
    for name in template.names() {
        // In capitals it is a constant; if there is none, rustc says so.
        let is_constant = !name.to_string().contains(char::is_lowercase);
        if !is_constant && !names.contains(name) {
            faults.add(literal.span(), unknown_argument(&name.to_string(), names));
            known = false;
        }
    }
    known.then_some(KeySource::Template(template))
}

fn unknown_argument(name: &str, names: &[Ident]) -> String {
    let names: Vec<String> = names.iter().map(Ident::to_string).collect();
    let known: Vec<&str> = names.iter().map(String::as_str).collect();
    let known = match (nearest(name, &known), known.as_slice()) {
        (_, []) => "the function has none".to_owned(),
        (Some(meant), _) => format!("write `{{{meant}}}`, or another one of {}", known.join(", ")),
        (None, _) => format!("write one of {}", known.join(", ")),
    };
    format!("`{name}` is no argument of the function: {known}")
}

/// A name that the body sees, such as the guard's.
pub(crate) fn new_name(given: Given, example: &str, names: &[Ident]) -> syn::Result<Ident> {
    let option = given.name.clone();
    let value = given.expr(&format!("write {option} = {example}"))?;
    let name = match &value {
        Expr::Path(path) => path.path.get_ident(),
        _ => None,
    };
    let Some(name) = name else {
        let fault = format!("`{option}` takes a new name: write {option} = {example}");
        return Err(Error::new(value.span(), fault));
    };
    if names.contains(name) {
        let fault = format!("`{name}` is an argument already: give the {option} another name");
        return Err(Error::new(name.span(), fault));
    }
    Ok(name.clone())
}

/// A string literal, if it is one.
pub(crate) fn text(expr: &Expr) -> Option<LitStr> {
    match expr {
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Some(text.clone()),
        Expr::Group(group) => text(&group.expr),
        _ => None,
    }
}

pub(crate) fn literal(given: Given, example: &str) -> syn::Result<LitStr> {
    let name = given.name.clone();
    let value = given.expr(&format!("write {example}"))?;
    text(&value).ok_or_else(|| {
        Error::new(value.span(), format!("`{name}` takes a string literal: write {example}"))
    })
}

/// One of some words, as a literal.
pub(crate) fn one_of(given: Given, words: &[&str], example: &str) -> syn::Result<String> {
    let name = given.name.clone();
    let value = literal(given, example)?;
    let word = value.value();
    if words.contains(&word.as_str()) {
        return Ok(word);
    }
    let words: Vec<String> = words.iter().map(|word| format!("{word:?}")).collect();
    let fault = format!("`{name}` is either {}", words.join(" or "));
    Err(Error::new(value.span(), fault))
}
