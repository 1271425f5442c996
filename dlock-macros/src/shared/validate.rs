//! The options that mean the same for every attribute.

use syn::Expr;

use super::args::Args;
use super::builder_calls::BuilderCall;
use super::errors::Errors;
use super::values::{expression, one_of};
use crate::paths::DlockPaths;

/// The options that mean the same for every attribute: whose lock it is, how it is
/// taken, and what is returned when it cannot be taken or is lost.
pub(crate) struct CommonOptions {
    pub(crate) dlock: DlockPaths,
    /// Without it, the global client is used.
    pub(crate) client: Option<Expr>,
    pub(crate) builder_calls: Vec<BuilderCall>,
    pub(crate) on_busy: Option<Expr>,
    pub(crate) on_error: Option<Expr>,
    pub(crate) on_lost: OnLost,
}

/// What happens to the body when the lock is lost.
#[derive(PartialEq)]
pub(crate) enum OnLost {
    /// The body is dropped at its next await.
    Cancel,
    /// The body runs to its end.
    Finish,
}

impl CommonOptions {
    pub(crate) fn validate(
        dlock: DlockPaths,
        builder_calls: Vec<BuilderCall>,
        args: &mut Args,
        errors: &mut Errors,
    ) -> Self {
        let on_lost = args.take("on_lost").and_then(|arg| {
            errors.record(one_of(arg, &["cancel", "finish"], "on_lost = \"finish\""))
        });
        CommonOptions {
            dlock,
            client: expression(args, "client", "client = self.dlock", errors),
            builder_calls,
            on_busy: expression(args, "on_busy", "on_busy = |error| ..", errors),
            on_error: expression(args, "on_error", "on_error = |error| ..", errors),
            on_lost: match on_lost.as_deref() {
                Some("finish") => OnLost::Finish,
                _ => OnLost::Cancel,
            },
        }
    }
}
