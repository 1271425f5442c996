//! The kinds of values that options have, apart from durations and keys.

use proc_macro2::{Ident, TokenStream};
use quote::quote;
use syn::spanned::Spanned as _;
use syn::{Error, Expr, ExprLit, ExprPath, Lit, LitStr, Path};

use super::args::{Arg, Args};
use super::errors::Errors;

/// The value of an option that takes any expression.
pub(crate) fn expression(
    args: &mut Args,
    name: &str,
    example: &str,
    errors: &mut Errors,
) -> Option<Expr> {
    let arg = args.take(name)?;
    errors.record(arg.required_value(example))
}

/// The path that the option `crate` gives.
pub(crate) fn crate_path(
    args: &mut Args,
    example: &str,
    errors: &mut Errors,
) -> Option<TokenStream> {
    let arg = args.take("crate")?;
    let path = arg.required_value(example).and_then(|value| match value {
        Expr::Path(ExprPath { path, .. }) => Ok(path),
        value => match string_literal(&value) {
            Some(literal) => literal.parse::<Path>(),
            None => {
                let message = format!("`crate` needs the path of the library: write {example}");
                Err(Error::new(value.span(), message))
            }
        },
    });
    errors.record(path).map(|path| quote!(#path))
}

/// The value of an option that names a variable of the body, such as the guard.
pub(crate) fn variable_name(arg: Arg, example: &str, arguments: &[Ident]) -> syn::Result<Ident> {
    let option = arg.name.clone();
    let value = arg.required_value(&format!("{option} = {example}"))?;
    let name = match &value {
        Expr::Path(path) => path.path.get_ident(),
        _ => None,
    };
    let Some(name) = name else {
        let message =
            format!("`{option}` needs a name for a new variable: write {option} = {example}");
        return Err(Error::new(value.span(), message));
    };
    if arguments.contains(name) {
        let message = format!(
            "`{name}` is already an argument of the function: choose another name, such as \
             {option} = {example}"
        );
        return Err(Error::new(name.span(), message));
    }
    Ok(name.clone())
}

/// The literal, if the expression is a string literal.
pub(crate) fn string_literal(expr: &Expr) -> Option<LitStr> {
    match expr {
        Expr::Lit(ExprLit { lit: Lit::Str(literal), .. }) => Some(literal.clone()),
        Expr::Group(group) => string_literal(&group.expr),
        _ => None,
    }
}

/// The value of an option that takes a string literal.
pub(crate) fn required_string(arg: Arg, example: &str) -> syn::Result<LitStr> {
    let name = arg.name.clone();
    let value = arg.required_value(example)?;
    string_literal(&value).ok_or_else(|| {
        Error::new(value.span(), format!("`{name}` needs a string literal: write {example}"))
    })
}

/// The value of an option that takes one of these words, as a string literal.
pub(crate) fn one_of(arg: Arg, words: &[&str], example: &str) -> syn::Result<String> {
    let name = arg.name.clone();
    let literal = required_string(arg, example)?;
    let word = literal.value();
    if words.contains(&word.as_str()) {
        return Ok(word);
    }
    let valid: Vec<String> = words.iter().map(|word| format!("{name} = {word:?}")).collect();
    let message = format!("`{name}` cannot be {word:?}: write {}", valid.join(" or "));
    Err(Error::new(literal.span(), message))
}
