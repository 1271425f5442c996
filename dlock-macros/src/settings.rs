//! What is called on the builder of a lock: `.ttl(..)`, `.wait(..)` and the like.

use std::time::Duration;

use proc_macro2::{Ident, TokenStream};
use quote::quote;
use syn::spanned::Spanned as _;
use syn::{Error, Expr, ExprLit, Lit, LitStr};

use crate::args::{Args, Faults, Given};
use crate::values::{literal, text};

/// `MAX_TTL` of dlock-core, which this crate cannot depend on.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A call on the lock's builder: `.ttl(..)`.
pub(crate) struct Setting {
    pub(crate) method: Ident,
    pub(crate) argument: TokenStream,
}

/// What is called on the builder. The policy comes after what it overrides.
pub(crate) fn settings(args: &mut Args, shared: bool, faults: &mut Faults) -> Vec<Setting> {
    let mut settings = Vec::new();
    let mut add = |name: &Ident, method: &str, argument| {
        settings.push(Setting { method: Ident::new(method, name.span()), argument });
    };
    let ms = Duration::from_millis(1);
    if let Some((name, time)) = time(args, "ttl", ms..=DAY, faults) {
        add(&name, "ttl", time.tokens());
    }
    match time(args, "wait", Duration::ZERO..=Duration::MAX, faults) {
        Some((name, Time::Unlimited)) => add(&name, "wait_unlimited", TokenStream::new()),
        Some((name, time)) => add(&name, "wait", time.tokens()),
        None => {}
    }
    let max_hold = time(args, "max_hold", ms..=Duration::MAX, faults);
    let at_least = time(args, "hold_at_least", ms..=DAY, faults);
    if let (Some((_, Time::Literal(max))), Some((name, Time::Literal(least)))) =
        (&max_hold, &at_least)
        && least > max
    {
        faults.add(
            name.span(),
            "`hold_at_least` is longer than `max_hold`, after which the lock ends: write a \
             shorter one",
        );
    }
    if let Some((name, _)) = at_least.as_ref().filter(|_| shared) {
        faults.add(
            name.span(),
            "`hold_at_least` needs a lock of one's own: remove it or mode = \"shared\"",
        );
    }
    for (method, time) in [("max_hold", max_hold), ("hold_at_least", at_least)] {
        if let Some((name, time)) = time {
            add(&name, method, time.tokens());
        }
    }
    if let Some(given) = args.take("policy") {
        let name = given.name.clone();
        if let Some(policy) = faults.note(policy(given)) {
            add(&name, "policy", quote!(#policy));
        }
    }
    if let Some(given) = args.take("fair") {
        let name = given.name.clone();
        match given.value {
            None => add(&name, "fair", TokenStream::new()),
            Some(Expr::Lit(ExprLit { lit: Lit::Bool(fair), .. })) => {
                if fair.value {
                    add(&name, "fair", TokenStream::new());
                }
            }
            Some(value) => faults.add(value.span(), "`fair` is either there or not: write fair"),
        }
    }
    if let Some(given) = args.take("name") {
        let option = given.name.clone();
        if let Some(name) = faults.note(label(given)) {
            add(&option, "name", quote!(#name));
        }
    }
    settings
}

fn policy(given: Given) -> syn::Result<LitStr> {
    let name = literal(given, "policy = \"payments\"")?;
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let text = name.value();
    if text.is_empty() || text.len() > 64 || !text.chars().all(plain) {
        return Err(Error::new(
            name.span(),
            "the name of a policy has 1 to 64 lower-case letters, digits or `_`, so that an \
             environment variable can hold it: write policy = \"payments\"",
        ));
    }
    Ok(name)
}

fn label(given: Given) -> syn::Result<LitStr> {
    let name = literal(given, "name = \"payments\"")?;
    if name.value().is_empty() || name.value().contains(char::is_control) {
        return Err(Error::new(name.span(), "a name that can be shown: write name = \"payments\""));
    }
    Ok(name)
}

pub(crate) enum Time {
    Literal(Duration),
    Unlimited,
    Expr(Expr),
}

impl Time {
    pub(crate) fn tokens(&self) -> TokenStream {
        match self {
            Time::Literal(duration) => {
                let (secs, nanos) = (duration.as_secs(), duration.subsec_nanos());
                quote!(::core::time::Duration::new(#secs, #nanos))
            }
            Time::Expr(expr) => quote!(#expr),
            Time::Unlimited => TokenStream::new(),
        }
    }
}

pub(crate) fn time(
    args: &mut Args,
    option: &str,
    bounds: std::ops::RangeInclusive<Duration>,
    faults: &mut Faults,
) -> Option<(Ident, Time)> {
    let given = args.take(option)?;
    let name = given.name.clone();
    let value = faults.note(given.expr(&format!("write {option} = \"30s\"")))?;
    let Some(literal) = text(&value) else {
        if let Expr::Lit(literal) = &value {
            faults.add(
                literal.span(),
                format!("a duration has a unit: write {option} = \"30s\", or a Duration"),
            );
            return None;
        }
        return Some((name, Time::Expr(value)));
    };
    let text = literal.value();
    if option == "wait" && text == "unlimited" {
        return Some((name, Time::Unlimited));
    }
    let fault = match humantime::parse_duration(&text) {
        Ok(duration) if bounds.contains(&duration) => return Some((name, Time::Literal(duration))),
        Ok(_) => {
            let least = humantime::format_duration(*bounds.start());
            let most = match *bounds.end() {
                Duration::MAX => String::new(),
                end => format!(" and {} at most", humantime::format_duration(end)),
            };
            format!("`{option}` is {text}, but must be {least} at least{most}")
        }
        Err(error) => format!(
            "`{text}` is no duration ({error}): write a number with its unit, such as \"150ms\", \
             \"30s\", \"5m\" or \"1h\""
        ),
    };
    faults.add(literal.span(), fault);
    None
}
