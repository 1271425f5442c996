//! The option `key` of the attributes.

use proc_macro2::{Ident, Span, TokenStream};
use quote::quote;
use syn::Expr;
use syn::ext::IdentExt as _;

use super::template::Template;
use crate::paths::DlockPaths;
use crate::shared::args::{Arg, Args, closest};
use crate::shared::errors::Errors;
use crate::shared::values::string_literal;

/// Where the key comes from.
pub(crate) enum KeySource {
    Template(Template),
    /// An expression that makes a key.
    Expr(Expr),
}

impl KeySource {
    /// The value of the option `key`, which must be there.
    pub(crate) fn required(
        key: Option<Arg>,
        args: &Args,
        arguments: &[Ident],
        errors: &mut Errors,
    ) -> Option<Self> {
        let Some(key) = key else {
            // If parsing stopped early, `key` may be in the part that was not read.
            if args.complete {
                errors.add(
                    Span::call_site(),
                    "`key` is missing: write key = \"order:{order_id}\", with the names of \
                     arguments in braces",
                );
            }
            return None;
        };
        let key = errors.record(key.required_value("key = \"order:{order_id}\""))?;
        Self::new(key, arguments, errors)
    }

    /// Checks that the template uses only arguments and constants.
    pub(crate) fn new(expr: Expr, arguments: &[Ident], errors: &mut Errors) -> Option<Self> {
        let Some(literal) = string_literal(&expr) else { return Some(KeySource::Expr(expr)) };
        let template = errors.record(Template::new(literal.clone()))?;
        let mut all_known = true;
        for variable in template.variables() {
            // A name in capitals is a constant; rustc reports one that does not exist.
            let is_constant = !variable.to_string().contains(char::is_lowercase);
            let is_argument = arguments.iter().any(|name| name.unraw() == variable.unraw());
            if !is_constant && !is_argument {
                let name = variable.unraw().to_string();
                errors.add(literal.span(), unknown_argument(&name, arguments));
                all_known = false;
            }
        }
        all_known.then_some(KeySource::Template(template))
    }

    /// An expression that implements `IntoKey`.
    pub(crate) fn expand(&self, dlock: &DlockPaths) -> TokenStream {
        match self {
            KeySource::Template(template) => template.expand(dlock),
            KeySource::Expr(expr) => quote!(#expr),
        }
    }
}

fn unknown_argument(name: &str, arguments: &[Ident]) -> String {
    let arguments: Vec<String> = arguments.iter().map(|name| name.unraw().to_string()).collect();
    let known: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let fix = match (closest(name, &known), known.as_slice()) {
        (_, []) => "add it, or remove it from the template".to_owned(),
        (Some(meant), _) => format!("write `{{{meant}}}`; the arguments are {}", known.join(", ")),
        (None, _) => format!("write one of its arguments, which are {}", known.join(", ")),
    };
    format!("the function has no argument `{name}`: {fix}")
}
