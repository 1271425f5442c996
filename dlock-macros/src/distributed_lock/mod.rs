//! `#[distributed_lock]`: runs a function under a lock.

mod expand;
mod validate;

use proc_macro2::{Ident, TokenStream};
use syn::Expr;

use crate::key::KeySource;
use crate::shared::Attribute;
use crate::shared::args::Args;
use crate::shared::errors::Errors;
use crate::shared::function::Body;
use crate::shared::validate::CommonOptions;

/// The attribute with valid options.
pub(crate) struct DistributedLock {
    common: CommonOptions,
    claim: Claim,
    /// The name under which the body sees the guard.
    guard: Option<Ident>,
    /// The condition under which the lock is taken.
    when: Option<Expr>,
}

/// The keys that are locked, and how.
enum Claim {
    Exclusive(KeySource),
    Shared(KeySource),
    Permits {
        key: KeySource,
        permits: Option<Box<Expr>>,
        of: Box<Expr>,
    },
    AllOf(Vec<KeySource>),
    /// All keys that an expression yields.
    AllOfExpr(Expr),
}

impl Attribute for DistributedLock {
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

    fn validate(args: Args, arguments: &[Ident], errors: &mut Errors) -> Option<Self> {
        validate::validate(args, arguments, errors)
    }

    fn expand(&self, body: &Body) -> TokenStream {
        expand::expand(self, body)
    }
}
