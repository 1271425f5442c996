//! Checks the options of `#[distributed_lock]` against each other and against the
//! function.

use proc_macro2::{Ident, Span};
use syn::spanned::Spanned as _;
use syn::{Error, Expr, ExprLit, Lit, LitInt};

use super::{Claim, DistributedLock};
use crate::key::KeySource;
use crate::paths::DlockPaths;
use crate::shared::args::{Arg, Args};
use crate::shared::builder_calls::builder_calls;
use crate::shared::errors::Errors;
use crate::shared::validate::CommonOptions;
use crate::shared::values::{crate_path, expression, one_of, variable_name};

pub(super) fn validate(
    mut args: Args,
    arguments: &[Ident],
    errors: &mut Errors,
) -> Option<DistributedLock> {
    let dlock = match crate_path(&mut args, "crate = dlock", errors) {
        Some(path) => DlockPaths::below(path),
        None => DlockPaths::found(),
    };
    let mode = mode(&mut args, errors);
    let is_shared = mode.as_ref().is_some_and(|mode| mode.is_shared);
    let builder_calls = builder_calls(&mut args, is_shared, errors);
    let claim = claim(&mut args, mode, arguments, errors);
    let common = CommonOptions::validate(dlock, builder_calls, &mut args, errors);
    let guard = args.take("guard").map(|arg| variable_name(arg, "lock", arguments));
    let attribute = DistributedLock {
        common,
        claim: claim?,
        guard: guard.and_then(|guard| errors.record(guard)),
        when: expression(&mut args, "when", "when = amount > 0", errors),
    };
    errors.is_empty().then_some(attribute)
}

/// The option `mode`.
struct Mode {
    /// The span of the option's name.
    span: Span,
    is_shared: bool,
}

fn mode(args: &mut Args, errors: &mut Errors) -> Option<Mode> {
    let arg = args.take("mode")?;
    let span = arg.span();
    let word = errors.record(one_of(arg, &["exclusive", "shared"], "mode = \"shared\""))?;
    Some(Mode { span, is_shared: word == "shared" })
}

fn claim(
    args: &mut Args,
    mode: Option<Mode>,
    arguments: &[Ident],
    errors: &mut Errors,
) -> Option<Claim> {
    let (key, keys) = (args.take("key"), args.take("keys"));
    let (permits, of) = (args.take("permits"), args.take("of"));
    if let (Some(_), Some(keys)) = (&key, &keys) {
        errors.add(
            keys.span(),
            "`key` and `keys` cannot be used together: write `key` for one key, or \
             keys = [\"..\", \"..\"] for several keys",
        );
        return None;
    }
    if let (Some(mode), Some(_)) = (&mode, permits.as_ref().or(of.as_ref())) {
        errors.add(
            mode.span,
            "`mode` cannot be used with `permits` and `of`, because permits are neither \
             exclusive nor shared: remove `mode`, or remove `permits` and `of`",
        );
        return None;
    }
    if let Some(keys) = keys {
        if let Some(other) = permits.as_ref().or(of.as_ref()) {
            errors.add(
                other.span(),
                "`permits` and `of` cannot be used with `keys`: remove them, or write one `key`",
            );
        }
        if let Some(mode) = mode.filter(|mode| mode.is_shared) {
            errors.add(
                mode.span,
                "`keys` are always locked exclusively: remove `mode`, or write one `key`",
            );
        }
        return all_of(keys, arguments, errors);
    }
    let key = KeySource::required(key, args, arguments, errors)?;
    match (permits, of) {
        (None, None) if mode.is_some_and(|mode| mode.is_shared) => Some(Claim::Shared(key)),
        (None, None) => Some(Claim::Exclusive(key)),
        (permits, Some(of)) => permits_of(key, permits, of, errors),
        (Some(permits), None) => {
            errors.add(
                permits.span(),
                "`permits` needs `of`, the number of all permits: write permits = 1, of = 10",
            );
            None
        }
    }
}

fn all_of(keys: Arg, arguments: &[Ident], errors: &mut Errors) -> Option<Claim> {
    const EXAMPLE: &str = "keys = [\"account:{from}\", \"account:{to}\"]";
    let keys = errors.record(keys.required_value(EXAMPLE))?;
    let Expr::Array(array) = keys else {
        if let Expr::Lit(literal) = &keys {
            errors.add(literal.span(), format!("`keys` needs a list: write {EXAMPLE}"));
            return None;
        }
        return Some(Claim::AllOfExpr(keys));
    };
    if array.elems.is_empty() {
        errors.add(array.span(), format!("`keys` must not be empty: write {EXAMPLE}"));
        return None;
    }
    // The first `collect` checks all keys, so that every error is reported.
    let sources: Vec<_> =
        array.elems.into_iter().map(|key| KeySource::new(key, arguments, errors)).collect();
    sources.into_iter().collect::<Option<_>>().map(Claim::AllOf)
}

fn permits_of(key: KeySource, permits: Option<Arg>, of: Arg, errors: &mut Errors) -> Option<Claim> {
    let of = errors.record(of.required_value("of = 10"))?;
    let permits = match permits {
        Some(permits) => Some(errors.record(permits.required_value("permits = 1, of = 10"))?),
        None => None,
    };
    let max = match &of {
        Expr::Lit(ExprLit { lit: Lit::Int(number), .. }) => {
            errors.record(count(number, u32::MAX))?
        }
        _ => u32::MAX,
    };
    if let Some(Expr::Lit(ExprLit { lit: Lit::Int(number), .. })) = &permits {
        errors.record(count(number, max))?;
    }
    Some(Claim::Permits { key, permits: permits.map(Box::new), of: Box::new(of) })
}

/// A number of permits from 1 to `max`.
fn count(number: &LitInt, max: u32) -> syn::Result<u32> {
    let error = |message: String| Err(Error::new(number.span(), message));
    match number.base10_parse::<u32>()? {
        0 => error("the number of permits must not be 0: write 1 or more".into()),
        count if count > max => error(format!(
            "`permits` cannot be more than `of`, which is {max}: write {max} or less"
        )),
        count => Ok(count),
    }
}
