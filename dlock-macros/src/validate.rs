//! What the options mean, checked against each other and against the function.

use std::time::Duration;

use proc_macro2::{Ident, Span, TokenStream};
use quote::quote;
use syn::spanned::Spanned as _;
use syn::{Error, Expr, ExprLit, ExprPath, Lit, LitInt, LitStr, Path};

use crate::args::{Args, Faults, Given, nearest};
use crate::paths;
use crate::template::Template;

/// Every option of `#[distributed_lock]`.
pub(crate) const OPTIONS: &[&str] = &[
    "key",
    "keys",
    "client",
    "ttl",
    "wait",
    "policy",
    "max_hold",
    "hold_at_least",
    "mode",
    "permits",
    "of",
    "fair",
    "guard",
    "when",
    "on_busy",
    "on_error",
    "on_lost",
    "name",
    "crate",
];

/// `MAX_TTL` of dlock-core, which this crate cannot depend on.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// What was asked for, and makes sense.
pub(crate) struct Plan {
    pub(crate) core: TokenStream,
    pub(crate) claim: Claim,
    pub(crate) client: Option<Expr>,
    pub(crate) settings: Vec<Setting>,
    pub(crate) guard: Option<Ident>,
    pub(crate) when: Option<Expr>,
    pub(crate) on_busy: Option<Expr>,
    pub(crate) on_error: Option<Expr>,
    /// Whether the body runs to its end when the lock is lost.
    pub(crate) finish: bool,
}

/// What is locked, and how.
pub(crate) enum Claim {
    Exclusive(KeySource),
    Shared(KeySource),
    Permits {
        key: KeySource,
        take: Option<Box<Expr>>,
        of: Box<Expr>,
    },
    AllOf(Vec<KeySource>),
    /// Of whatever an expression yields.
    AllIn(Expr),
}

pub(crate) enum KeySource {
    Template(Template),
    Expr(Expr),
}

/// A call on the lock's builder: `.ttl(..)`.
pub(crate) struct Setting {
    pub(crate) method: Ident,
    pub(crate) argument: TokenStream,
}

impl Plan {
    /// The plan; or none, and the faults say why.
    pub(crate) fn new(mut args: Args, names: &[Ident], faults: &mut Faults) -> Option<Self> {
        let core = core_path(&mut args, faults);
        let mode = mode(&mut args, faults);
        let shared = mode.as_ref().is_some_and(|(_, shared)| *shared);
        let settings = settings(&mut args, shared, faults);
        let claim = claim(&mut args, mode, names, faults);
        let on_lost = args.take("on_lost").and_then(|given| {
            faults.note(one_of(given, &["cancel", "finish"], "on_lost = \"finish\""))
        });
        let plan = Plan {
            core,
            claim: claim?,
            client: expr(&mut args, "client", "client = self.dlock", faults),
            settings,
            guard: args.take("guard").and_then(|given| faults.note(guard(given, names))),
            when: expr(&mut args, "when", "when = amount > 0", faults),
            on_busy: expr(&mut args, "on_busy", "on_busy = |error| ..", faults),
            on_error: expr(&mut args, "on_error", "on_error = |error| ..", faults),
            finish: on_lost.is_some_and(|word| word == "finish"),
        };
        faults.is_empty().then_some(plan)
    }
}

fn expr(args: &mut Args, name: &str, example: &str, faults: &mut Faults) -> Option<Expr> {
    let given = args.take(name)?;
    faults.note(given.expr(&format!("write {example}")))
}

fn core_path(args: &mut Args, faults: &mut Faults) -> TokenStream {
    let Some(given) = args.take("crate") else { return paths::core() };
    let path = given.expr("write crate = dlock").and_then(|value| match value {
        Expr::Path(ExprPath { path, .. }) => Ok(path),
        value => match text(&value) {
            Some(text) => text.parse::<Path>(),
            None => Err(Error::new(value.span(), "`crate` takes a path: write crate = dlock")),
        },
    });
    faults.note(path).map_or_else(paths::core, |path| quote!(#path))
}

/// Whether the lock is shared, and where that is said.
fn mode(args: &mut Args, faults: &mut Faults) -> Option<(Span, bool)> {
    let given = args.take("mode")?;
    let name = given.span();
    let word = faults.note(one_of(given, &["exclusive", "shared"], "mode = \"shared\""))?;
    Some((name, word == "shared"))
}

fn claim(
    args: &mut Args,
    mode: Option<(Span, bool)>,
    names: &[Ident],
    faults: &mut Faults,
) -> Option<Claim> {
    let (key, keys) = (args.take("key"), args.take("keys"));
    let (permits, of) = (args.take("permits"), args.take("of"));
    if let (Some(_), Some(keys)) = (&key, &keys) {
        faults.add(
            keys.span(),
            "`key` and `keys` exclude each other: write key for one, keys = [\"..\", \"..\"] for \
             several at once",
        );
        return None;
    }
    if let (Some((mode, _)), Some(_)) = (&mode, permits.as_ref().or(of.as_ref())) {
        faults.add(
            *mode,
            "`mode` and `permits` exclude each other: permits are neither exclusive nor shared; \
             remove one of them",
        );
        return None;
    }
    if let Some(keys) = keys {
        if let Some(other) = permits.as_ref().or(of.as_ref()).map(Given::span) {
            faults.add(other, "several `keys` are taken as locks, not as permits: write one `key`");
        }
        if let Some((mode, true)) = mode {
            faults.add(
                mode,
                "several `keys` are taken exclusively: remove `mode`, or write one `key`",
            );
        }
        return several(keys, names, faults);
    }
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
    let key = key_source(key, names, faults)?;
    match (permits, of) {
        (None, None) if mode.is_some_and(|(_, shared)| shared) => Some(Claim::Shared(key)),
        (None, None) => Some(Claim::Exclusive(key)),
        (permits, Some(of)) => some_permits(key, permits, of, faults),
        (Some(permits), None) => {
            faults.add(permits.span(), "`permits` of how many? Write permits = 1, of = 10");
            None
        }
    }
}

fn several(keys: Given, names: &[Ident], faults: &mut Faults) -> Option<Claim> {
    const EXAMPLE: &str = "write keys = [\"account:{from}\", \"account:{to}\"]";
    let keys = faults.note(keys.expr(EXAMPLE))?;
    let Expr::Array(array) = keys else {
        if let Expr::Lit(literal) = &keys {
            faults.add(literal.span(), format!("`keys` takes several: {EXAMPLE}"));
            return None;
        }
        return Some(Claim::AllIn(keys));
    };
    if array.elems.is_empty() {
        faults.add(array.span(), format!("`keys` names no key: {EXAMPLE}"));
        return None;
    }
    let sources = array.elems.into_iter().map(|key| key_source(key, names, faults));
    sources.collect::<Vec<_>>().into_iter().collect::<Option<_>>().map(Claim::AllOf)
}

fn some_permits(
    key: KeySource,
    permits: Option<Given>,
    of: Given,
    faults: &mut Faults,
) -> Option<Claim> {
    let of = faults.note(of.expr("write of = 10"))?;
    let take = match permits {
        Some(permits) => Some(faults.note(permits.expr("write permits = 1, of = 10"))?),
        None => None,
    };
    let mut in_bounds = |expr: &Expr, max: u32| match expr {
        Expr::Lit(ExprLit { lit: Lit::Int(number), .. }) => {
            faults.note(count(number, max)).is_some()
        }
        _ => true,
    };
    let most = match &of {
        Expr::Lit(ExprLit { lit: Lit::Int(number), .. }) => {
            number.base10_parse().unwrap_or(u32::MAX)
        }
        _ => u32::MAX,
    };
    let fit = in_bounds(&of, u32::MAX) && take.as_ref().is_none_or(|take| in_bounds(take, most));
    fit.then(|| Claim::Permits { key, take: take.map(Box::new), of: Box::new(of) })
}

fn count(number: &LitInt, max: u32) -> syn::Result<u32> {
    let fault = |fault: String| Err(Error::new(number.span(), fault));
    match number.base10_parse::<u32>()? {
        0 => fault("no permits at all lock nothing: write 1 or more".into()),
        count if count > max => {
            fault(format!("{count} permits of {max} can never be had: write {max} or less"))
        }
        count => Ok(count),
    }
}

fn key_source(expr: Expr, names: &[Ident], faults: &mut Faults) -> Option<KeySource> {
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

fn guard(given: Given, names: &[Ident]) -> syn::Result<Ident> {
    let value = given.expr("write guard = lock")?;
    let name = match &value {
        Expr::Path(path) => path.path.get_ident(),
        _ => None,
    };
    let Some(name) = name else {
        return Err(Error::new(value.span(), "`guard` takes a new name: write guard = lock"));
    };
    if names.contains(name) {
        let fault = format!("`{name}` is an argument already: give the guard another name");
        return Err(Error::new(name.span(), fault));
    }
    Ok(name.clone())
}

/// What is called on the builder. The policy comes after what it overrides.
fn settings(args: &mut Args, shared: bool, faults: &mut Faults) -> Vec<Setting> {
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

enum Time {
    Literal(Duration),
    Unlimited,
    Expr(Expr),
}

impl Time {
    fn tokens(&self) -> TokenStream {
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

fn time(
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

/// A string literal, if it is one.
fn text(expr: &Expr) -> Option<LitStr> {
    match expr {
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Some(text.clone()),
        Expr::Group(group) => text(&group.expr),
        _ => None,
    }
}

fn literal(given: Given, example: &str) -> syn::Result<LitStr> {
    let name = given.name.clone();
    let value = given.expr(&format!("write {example}"))?;
    text(&value).ok_or_else(|| {
        Error::new(value.span(), format!("`{name}` takes a string literal: write {example}"))
    })
}

/// One of some words, as a literal.
fn one_of(given: Given, words: &[&str], example: &str) -> syn::Result<String> {
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
