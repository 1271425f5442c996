//! The value of an option that takes a duration.

use std::ops::RangeInclusive;
use std::time::Duration;

use proc_macro2::{Ident, TokenStream};
use quote::quote;
use syn::Expr;
use syn::spanned::Spanned as _;

use super::args::Args;
use super::errors::Errors;
use super::values::string_literal;

/// A duration as it was written.
pub(crate) enum DurationValue {
    /// `"30s"`
    Literal(Duration),
    /// `"unlimited"`
    Unlimited,
    /// An expression of type `Duration`.
    Expr(Expr),
}

impl DurationValue {
    /// The duration as code.
    pub(crate) fn expand(&self) -> TokenStream {
        match self {
            DurationValue::Literal(duration) => {
                let (secs, nanos) = (duration.as_secs(), duration.subsec_nanos());
                quote!(::core::time::Duration::new(#secs, #nanos))
            }
            DurationValue::Expr(expr) => quote!(#expr),
            DurationValue::Unlimited => TokenStream::new(),
        }
    }
}

/// The name and the value of an option that takes a duration. Only a literal can be
/// checked against the bounds here.
pub(crate) fn duration(
    args: &mut Args,
    option: &str,
    bounds: RangeInclusive<Duration>,
    errors: &mut Errors,
) -> Option<(Ident, DurationValue)> {
    let arg = args.take(option)?;
    let name = arg.name.clone();
    let value = errors.record(arg.required_value(&format!("{option} = \"30s\"")))?;
    let Some(literal) = string_literal(&value) else {
        if let Expr::Lit(literal) = &value {
            errors.add(
                literal.span(),
                format!("a duration needs a unit: write {option} = \"30s\", or an expression of type Duration"),
            );
            return None;
        }
        return Some((name, DurationValue::Expr(value)));
    };
    let written = literal.value();
    if option == "wait" && written == "unlimited" {
        return Some((name, DurationValue::Unlimited));
    }
    let message = match humantime::parse_duration(&written) {
        Ok(duration) if bounds.contains(&duration) => {
            return Some((name, DurationValue::Literal(duration)));
        }
        Ok(_) => {
            let least = humantime::format_duration(*bounds.start());
            let valid = match *bounds.end() {
                Duration::MAX => format!("of at least {least}"),
                most => format!("from {least} to {}", humantime::format_duration(most)),
            };
            format!("`{option}` cannot be {written}: write a duration {valid}")
        }
        Err(error) => format!(
            "`{written}` is not a valid duration ({error}): write a number with a unit, such as \
             \"150ms\", \"30s\", \"5m\" or \"1h\""
        ),
    };
    errors.add(literal.span(), message);
    None
}
