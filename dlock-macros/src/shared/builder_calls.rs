//! Options that become calls on the lock's builder: `ttl = "30s"` becomes `.ttl(..)`.

use std::time::Duration;

use proc_macro2::{Ident, TokenStream};
use quote::quote;
use syn::spanned::Spanned as _;
use syn::{Error, Expr, ExprLit, Lit, LitStr};

use super::args::{Arg, Args};
use super::duration::{DurationValue, duration};
use super::errors::Errors;
use super::values::required_string;

/// `MAX_TTL` of dlock-core, which this crate cannot depend on.
const MAX_TTL: Duration = Duration::from_secs(24 * 60 * 60);

/// The shortest ttl and hold time that a backend can keep.
const MIN_TTL: Duration = Duration::from_millis(1);

/// A call on the lock's builder: `.ttl(..)`.
pub(crate) struct BuilderCall {
    pub(crate) method: Ident,
    pub(crate) argument: TokenStream,
}

/// The calls on the lock's builder. The policy comes after the options that it
/// overrides.
pub(crate) fn builder_calls(
    args: &mut Args,
    is_shared: bool,
    errors: &mut Errors,
) -> Vec<BuilderCall> {
    let mut calls = Vec::new();
    // The method gets the span of the option: there rustc shows an argument of
    // another type.
    let mut add = |name: &Ident, method: &str, argument| {
        calls.push(BuilderCall { method: Ident::new(method, name.span()), argument });
    };
    if let Some((name, ttl)) = duration(args, "ttl", MIN_TTL..=MAX_TTL, errors) {
        add(&name, "ttl", ttl.expand());
    }
    match duration(args, "wait", Duration::ZERO..=Duration::MAX, errors) {
        Some((name, DurationValue::Unlimited)) => add(&name, "wait_unlimited", TokenStream::new()),
        Some((name, wait)) => add(&name, "wait", wait.expand()),
        None => {}
    }
    for (name, time) in hold_times(args, is_shared, errors).into_iter().flatten() {
        add(&name, &name.to_string(), time.expand());
    }
    if let Some(arg) = args.take("policy") {
        let option = arg.name.clone();
        if let Some(policy) = errors.record(policy(arg)) {
            add(&option, "policy", quote!(#policy));
        }
    }
    if let Some(arg) = args.take("fair") {
        let option = arg.name.clone();
        match arg.value {
            None => add(&option, "fair", TokenStream::new()),
            Some(Expr::Lit(ExprLit { lit: Lit::Bool(fair), .. })) => {
                if fair.value {
                    add(&option, "fair", TokenStream::new());
                }
            }
            Some(value) => {
                errors.add(value.span(), "`fair` has no value: write `fair`, or remove it")
            }
        }
    }
    if let Some(arg) = args.take("name") {
        let option = arg.name.clone();
        if let Some(name) = errors.record(lock_name(arg)) {
            add(&option, "name", quote!(#name));
        }
    }
    calls
}

/// `max_hold` and `hold_at_least`.
fn hold_times(
    args: &mut Args,
    is_shared: bool,
    errors: &mut Errors,
) -> [Option<(Ident, DurationValue)>; 2] {
    let max_hold = duration(args, "max_hold", MIN_TTL..=Duration::MAX, errors);
    let hold_at_least = duration(args, "hold_at_least", MIN_TTL..=MAX_TTL, errors);
    if let (Some((_, DurationValue::Literal(most))), Some((name, DurationValue::Literal(least)))) =
        (&max_hold, &hold_at_least)
        && least > most
    {
        errors.add(
            name.span(),
            "`hold_at_least` is longer than `max_hold`, after which the lock ends: write a shorter \
             `hold_at_least` or a longer `max_hold`",
        );
    }
    if let Some((name, _)) = hold_at_least.as_ref().filter(|_| is_shared) {
        errors.add(
            name.span(),
            "a shared lock cannot have `hold_at_least`: remove `hold_at_least`, or remove \
             mode = \"shared\"",
        );
    }
    [max_hold, hold_at_least]
}

fn policy(arg: Arg) -> syn::Result<LitStr> {
    let literal = required_string(arg, "policy = \"payments\"")?;
    let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let policy = literal.value();
    if policy.is_empty() || policy.len() > 64 || !policy.chars().all(is_allowed) {
        return Err(Error::new(
            literal.span(),
            "the name of a policy must have 1 to 64 lower-case letters, digits or `_`, because \
             environment variables contain it: write policy = \"payments\"",
        ));
    }
    Ok(literal)
}

/// The name of the lock in metrics, logs and errors.
fn lock_name(arg: Arg) -> syn::Result<LitStr> {
    let literal = required_string(arg, "name = \"payments\"")?;
    if literal.value().is_empty() || literal.value().contains(char::is_control) {
        return Err(Error::new(
            literal.span(),
            "`name` must not be empty or contain control characters: write name = \"payments\"",
        ));
    }
    Ok(literal)
}
