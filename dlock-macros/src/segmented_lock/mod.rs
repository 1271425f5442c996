//! `#[segmented_lock]`: runs a function under the lock of one segment after the other.

mod expand;
mod validate;

use proc_macro2::{Ident, TokenStream};
use syn::Expr;

use crate::key::KeySource;
use crate::paths::SegmentPaths;
use crate::shared::Attribute;
use crate::shared::args::Args;
use crate::shared::errors::Errors;
use crate::shared::function::Body;
use crate::shared::validate::CommonOptions;

/// The attribute with valid options.
pub(crate) struct SegmentedLock {
    paths: SegmentPaths,
    common: CommonOptions,
    key: KeySource,
    /// The number of segments, or their names and weights.
    segments: Expr,
    segment: BodyVariable,
    guard: BodyVariable,
}

/// A variable that the body sees.
struct BodyVariable {
    name: Ident,
    /// Whether the user chose the name. If not, the body need not use the variable.
    is_chosen: bool,
}

impl Attribute for SegmentedLock {
    const OPTIONS: &[&str] = &[
        "key", "segments", "segment", "guard", "client", "ttl", "wait", "policy", "max_hold",
        "dry_for", "prefer", "on_busy", "on_error", "on_lost", "name", "crate",
    ];

    fn validate(args: Args, arguments: &[Ident], errors: &mut Errors) -> Option<Self> {
        validate::validate(args, arguments, errors)
    }

    fn expand(&self, body: &Body) -> TokenStream {
        expand::expand(self, body)
    }

    fn declare_variables(arguments: &[Ident]) -> TokenStream {
        expand::declare_variables(arguments)
    }
}
