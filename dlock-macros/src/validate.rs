//! What the options mean, checked against each other and against the function.

use proc_macro2::{Ident, Span, TokenStream};
use syn::spanned::Spanned as _;
use syn::{Error, Expr, ExprLit, Lit, LitInt};

use crate::args::{Args, Faults, Given};
use crate::function::Body;
use crate::terms::{Attribute, Terms};
use crate::values::{KeySource, crate_path, expr, key_source, new_name, one_of};
use crate::{paths, settings};

/// What was asked for, and makes sense.
pub(crate) struct Plan {
    pub(crate) terms: Terms,
    pub(crate) claim: Claim,
    pub(crate) guard: Option<Ident>,
    pub(crate) when: Option<Expr>,
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

impl Attribute for Plan {
    const OPTIONS: &[&str] = &[
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

    fn new(mut args: Args, names: &[Ident], faults: &mut Faults) -> Option<Self> {
        let core = crate_path(&mut args, paths::core(), faults);
        let mode = mode(&mut args, faults);
        let shared = mode.as_ref().is_some_and(|(_, shared)| *shared);
        let settings = settings::settings(&mut args, shared, faults);
        let claim = claim(&mut args, mode, names, faults);
        let terms = Terms::new(core, settings, &mut args, faults);
        let guard = args.take("guard").map(|given| new_name(given, "lock", names));
        let plan = Plan {
            terms,
            claim: claim?,
            guard: guard.and_then(|guard| faults.note(guard)),
            when: expr(&mut args, "when", "when = amount > 0", faults),
        };
        faults.is_empty().then_some(plan)
    }

    fn code(&self, body: &Body) -> TokenStream {
        self.around(body)
    }
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
    let key = KeySource::needed(key, args, names, faults)?;
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
