//! Checks the options of `#[segmented_lock]` against each other and against the
//! function.

use std::time::Duration;

use proc_macro2::{Ident, Span};
use quote::quote;
use syn::spanned::Spanned as _;
use syn::{Error, Expr, ExprLit, Lit};

use super::{BodyVariable, SegmentedLock};
use crate::key::KeySource;
use crate::paths::SegmentPaths;
use crate::shared::args::{Arg, Args};
use crate::shared::builder_calls::{BuilderCall, builder_calls};
use crate::shared::duration::duration;
use crate::shared::errors::Errors;
use crate::shared::validate::CommonOptions;
use crate::shared::values::{crate_path, expression, variable_name};

/// `MAX_SEGMENTS` of dlock-segment, which this crate cannot depend on.
const MAX_SEGMENTS: u32 = 4096;

const EXAMPLE: &str = "segments = 20, or segments = [(\"eu\", 600), (\"us\", 400)] for names \
                       with weights";

pub(super) fn validate(
    mut args: Args,
    arguments: &[Ident],
    errors: &mut Errors,
) -> Option<SegmentedLock> {
    let paths = match crate_path(&mut args, "crate = dlock_segment", errors) {
        Some(path) => SegmentPaths::below(path),
        None => SegmentPaths::found(),
    };
    let mut builder_calls = builder_calls(&mut args, false, errors);
    builder_calls.extend(dry_for(&mut args, errors));
    builder_calls.extend(prefer(&mut args, errors));
    let key = args.take("key");
    let key = KeySource::required(key, &args, arguments, errors);
    let segments = segments(&mut args, errors);
    let common = CommonOptions::validate(paths.dlock(), builder_calls, &mut args, errors);
    let segment = errors.record(body_variable(&mut args, "segment", "my_segment", arguments));
    let guard = errors.record(body_variable(&mut args, "guard", "lock", arguments));
    let attribute = SegmentedLock {
        paths,
        common,
        key: key?,
        segments: segments?,
        segment: segment?,
        guard: guard?,
    };
    errors.is_empty().then_some(attribute)
}

fn dry_for(args: &mut Args, errors: &mut Errors) -> Option<BuilderCall> {
    let (method, dry_for) = duration(args, "dry_for", Duration::ZERO..=Duration::MAX, errors)?;
    Some(BuilderCall { method, argument: dry_for.expand() })
}

fn prefer(args: &mut Args, errors: &mut Errors) -> Option<BuilderCall> {
    let method = Ident::new("prefer", Span::call_site());
    let segment = expression(args, "prefer", "prefer = \"eu\"", errors)?;
    Some(BuilderCall { method, argument: quote!(#segment) })
}

fn segments(args: &mut Args, errors: &mut Errors) -> Option<Expr> {
    let Some(arg) = args.take("segments") else {
        // If parsing stopped early, `segments` may be in the part that was not read.
        if args.complete {
            errors.add(Span::call_site(), format!("`segments` is missing: write {EXAMPLE}"));
        }
        return None;
    };
    errors.record(validate_segments(arg))
}

fn validate_segments(arg: Arg) -> syn::Result<Expr> {
    let segments = arg.required_value(EXAMPLE)?;
    let error = |span: Span, rule: &str| Err(Error::new(span, format!("{rule}: write {EXAMPLE}")));
    match &segments {
        Expr::Lit(ExprLit { lit: Lit::Int(number), .. }) => {
            let in_bounds = number.base10_parse().is_ok_and(|n| (1..=MAX_SEGMENTS).contains(&n));
            if !in_bounds {
                return error(
                    number.span(),
                    &format!("the number of segments must be 1 to {MAX_SEGMENTS}"),
                );
            }
        }
        Expr::Lit(literal) => {
            return error(literal.span(), "`segments` must be a number, or names with weights");
        }
        Expr::Array(array) if array.elems.is_empty() => {
            return error(array.span(), "`segments` must not be empty");
        }
        Expr::Array(array) => {
            if let Some(bare) = array.elems.iter().find(|element| matches!(element, Expr::Lit(_))) {
                return error(bare.span(), "every segment needs a name and a weight");
            }
        }
        _ => {}
    }
    Ok(segments)
}

/// A variable that has the name of the option, unless the user chose another one.
fn body_variable(
    args: &mut Args,
    option: &str,
    example: &str,
    arguments: &[Ident],
) -> syn::Result<BodyVariable> {
    if let Some(arg) = args.take(option) {
        let name = variable_name(arg, example, arguments)?;
        return Ok(BodyVariable { name, is_chosen: true });
    }
    if let Some(argument) = arguments.iter().find(|argument| *argument == option) {
        let message = format!(
            "the attribute gives the body a variable `{option}`, but the function has an \
             argument of this name: write {option} = {example} in the attribute, or rename the \
             argument"
        );
        return Err(Error::new(argument.span(), message));
    }
    Ok(BodyVariable { name: Ident::new(option, Span::call_site()), is_chosen: false })
}
