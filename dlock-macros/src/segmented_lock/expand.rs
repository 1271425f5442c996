//! The code that `#[segmented_lock]` writes around the body:
//!
//! ```text
//! let error = match global().map(|client| SegmentedLock::new(client, key, 20).pick()) {
//!     Ok(segments) => loop {
//!         match segments.next().await {
//!             Ok(Some((segment, guard))) => {
//!                 match guard.run(async { body }).await {
//!                     Ok(value) if !value.is_dry() => return value,
//!                     Ok(_) => {}
//!                     Err(lost) => break lost,
//!                 }
//!                 segments.dry();
//!             }
//!             Ok(None) => return MayBeDry::dry(),
//!             Err(error) => break error,
//!         }
//!     },
//!     Err(error) => error,
//! };
//! Fallible::from_error(error)
//! ```
//!
//! The body runs once for each segment, so it borrows the arguments. Its value is
//! dropped before anything else is awaited, so it need not be `Send`.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{quote, quote_spanned};

use super::{BodyVariable, SegmentedLock};
use crate::paths::SegmentPaths;
use crate::shared::function::Body;

/// The code of the function, with the body inside.
pub(super) fn expand(attribute: &SegmentedLock, body: &Body) -> TokenStream {
    let (pick, run) = (body.rename_self(attribute.pick()), attribute.run(body));
    let busy_arm = attribute.common.busy_arm(body);
    let return_error = attribute.common.return_error(body);
    let dry = attribute.call_may_be_dry(body, &quote!(dry()));
    quote_spanned! {Span::mixed_site()=>
        let error = match #pick {
            ::core::result::Result::Ok(mut segments) => loop {
                let next = segments.next().await;
                match next {
                    ::core::result::Result::Ok(::core::option::Option::Some((segment, held))) => {
                        #run
                        segments.dry();
                    }
                    ::core::result::Result::Ok(::core::option::Option::None) => return #dry,
                    #busy_arm
                    ::core::result::Result::Err(error) => break error,
                }
            },
            ::core::result::Result::Err(error) => error,
        };
        #return_error
    }
}

/// Declares `segment` and `guard` for a body whose attribute has an error.
pub(super) fn declare_variables(arguments: &[Ident]) -> TokenStream {
    let paths = SegmentPaths::found();
    let unbound = paths.unbound();
    [("segment", paths.segment()), ("guard", paths.dlock().guard())]
        .into_iter()
        .filter(|(name, _)| !arguments.iter().any(|argument| argument == name))
        .map(|(name, ty)| {
            let name = Ident::new(name, Span::call_site());
            quote! {
                #[allow(unused_variables)]
                let #name = #unbound::<#ty>();
            }
        })
        .collect()
}

impl SegmentedLock {
    /// An expression of type `Result`: the iteration over the segments, or the error.
    fn pick(&self) -> TokenStream {
        let SegmentedLock { paths, common, segments, .. } = self;
        let (split, key) = (paths.split(), self.key.expand(&common.dlock));
        let builder = quote_spanned!(Span::mixed_site()=> #split(client, #key, #segments));
        let error = common.dlock.error();
        let pick = quote_spanned! {Span::mixed_site()=>
            ::core::result::Result::<_, #error>::Ok(lock.pick())
        };
        common.with_lock(&builder, &pick)
    }

    /// Runs the body on `segment` under the guard `held`, and returns its value from
    /// the function unless it says that the segment is dry.
    fn run(&self, body: &Body) -> TokenStream {
        let segment = self.segment.declare(&quote_spanned!(Span::mixed_site()=> &segment));
        let guard = self.guard.declare(&quote_spanned!(Span::mixed_site()=> &held));
        let (type_hint, tokens, run) = (body.type_hint(), &body.tokens, self.common.run_method());
        let is_dry =
            self.call_may_be_dry(body, &quote_spanned!(Span::mixed_site()=> is_dry(&value)));
        // At the span of the body: there rustc shows the error about a moved argument.
        let body_span = body.span.resolved_at(Span::mixed_site());
        let future = quote_spanned!(body_span=> async { #type_hint #tokens });
        quote_spanned! {Span::mixed_site()=>
            #segment
            #guard
            {
                let value = match held.#run(#future).await {
                    ::core::result::Result::Ok(value) => value,
                    ::core::result::Result::Err(lost) => break lost,
                };
                if !#is_dry {
                    return value;
                }
            }
        }
    }

    /// Calls a function of the trait that tells whether a segment is dry.
    fn call_may_be_dry(&self, body: &Body, call: &TokenStream) -> TokenStream {
        let Body { output, output_span, .. } = body;
        let span = output_span.resolved_at(Span::mixed_site());
        let may_be_dry = self.paths.may_be_dry(span);
        quote_spanned!(span=> <#output as #may_be_dry>::#call)
    }
}

impl BodyVariable {
    /// Declares the variable with this value.
    fn declare(&self, value: &TokenStream) -> TokenStream {
        let name = &self.name;
        let allow = (!self.is_chosen).then(|| quote!(#[allow(unused_variables)]));
        quote_spanned!(Span::mixed_site()=> #allow let #name = #value;)
    }
}
