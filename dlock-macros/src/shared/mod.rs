//! What the attributes share.
//!
//! Each attribute goes through the same stages: `args` reads the options as they
//! are written, `validate` checks them against each other and against the function,
//! `expand` writes the code. `function` is the annotated function.

pub(crate) mod args;
pub(crate) mod async_trait;
pub(crate) mod builder_calls;
pub(crate) mod duration;
pub(crate) mod errors;
pub(crate) mod expand;
pub(crate) mod function;
pub(crate) mod validate;
pub(crate) mod values;

use proc_macro2::{Ident, TokenStream};

use self::args::Args;
use self::errors::Errors;
use self::function::{Body, Function};

/// An attribute whose options are valid.
pub(crate) trait Attribute: Sized {
    /// The name of every option.
    const OPTIONS: &[&str];

    /// Checks the options of a function with these arguments. Without a result,
    /// `errors` says why.
    fn validate(args: Args, arguments: &[Ident], errors: &mut Errors) -> Option<Self>;

    /// The code of the function, with the body inside.
    fn expand(&self, body: &Body) -> TokenStream;

    /// Variables that the attribute gives to the body. When the attribute has an
    /// error they are declared so that rustc does not also complain about them.
    fn declare_variables(_arguments: &[Ident]) -> TokenStream {
        TokenStream::new()
    }
}

/// The function with a lock around its body. If something is wrong: the errors,
/// and the function without the lock, so that editors still understand it.
pub(crate) fn expand_attribute<A: Attribute>(args: TokenStream, item: TokenStream) -> TokenStream {
    let mut errors = Errors::default();
    let args = Args::parse(args, A::OPTIONS, &mut errors);
    let function = match syn::parse2::<Function>(item.clone()) {
        Ok(function) => function,
        Err(error) => return [item, error.to_compile_error()].into_iter().collect(),
    };
    let body = function.lockable_body(&mut errors);
    let arguments = match &body {
        Some(body) => body.arguments.clone(),
        None => function.arguments(),
    };
    let attribute = A::validate(args, &arguments, &mut errors);
    match (body, attribute) {
        (Some(body), Some(attribute)) => function.with_code(&body, attribute.expand(&body)),
        _ => {
            let mut tokens = errors.into_tokens();
            tokens.extend(function.without_lock(&A::declare_variables(&arguments)));
            tokens
        }
    }
}
