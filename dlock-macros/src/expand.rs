//! The code around the body.
//!
//! ```text
//! let error = match global()?.mutex(key).ttl(..).lock().await {
//!     Ok(held) => match held.run(async move { body }).await {
//!         Ok(value) => return value,
//!         Err(lost) => lost,
//!     },
//!     Err(error) => error,
//! };
//! Fallible::from_error(error)
//! ```
//!
//! The guard is dropped when the body's value is there: nothing is awaited after
//! it, so that a value that is not `Send` does not make the future so. Names are
//! those of the macro (`mixed_site`): the body cannot see them. What the user
//! wrote keeps its spans, and appears once.

use proc_macro2::{Group, Ident, Span, TokenStream, TokenTree};
use quote::{quote, quote_spanned};
use syn::spanned::Spanned as _;

use crate::function::{Body, Function};
use crate::validate::{Claim, KeySource, Plan, Setting};

pub(crate) fn function(function: &Function, body: &Body, plan: &Plan) -> TokenStream {
    let code = plan.code(body);
    function.around(body, code)
}

impl Plan {
    fn code(&self, body: &Body) -> TokenStream {
        let rename = |tokens| if body.renamed_self { renamed(tokens) } else { tokens };
        let (taken, work) = (rename(self.taken()), self.work(body));
        let (busy, failed) = (self.busy(body).map(rename), rename(self.failed(body)));
        quote_spanned! {Span::mixed_site()=>
            let error = match #taken {
                ::core::result::Result::Ok(held) => { #work }
                #busy
                ::core::result::Result::Err(error) => error,
            };
            #failed
        }
    }

    /// The guard, or why there is none.
    fn taken(&self) -> TokenStream {
        let Plan { core, client, settings, .. } = self;
        let claim = self.claim();
        let calls = settings.iter().map(|Setting { method, argument }| quote!(.#method(#argument)));
        let lock = quote_spanned!(Span::mixed_site()=> client #claim #(#calls)*);
        let taken = match client {
            // The borrow of the client ends before the wait begins.
            Some(expr) => {
                let borrowed = quote_spanned!(expr.span()=> &#expr);
                quote_spanned! {Span::mixed_site()=> {
                    let lock = {
                        let client: &#core::Dlock = #borrowed;
                        #lock
                    };
                    lock.lock().await
                }}
            }
            None => quote_spanned! {Span::mixed_site()=>
                match #core::global() {
                    ::core::result::Result::Ok(client) => {
                        let lock = #lock;
                        lock.lock().await
                    }
                    ::core::result::Result::Err(error) => ::core::result::Result::Err(error),
                }
            },
        };
        match &self.when {
            None => taken,
            Some(when) => quote_spanned! {Span::mixed_site()=>
                if #when {
                    #taken.map(::core::option::Option::Some)
                } else {
                    ::core::result::Result::Ok(::core::option::Option::None)
                }
            },
        }
    }

    fn claim(&self) -> TokenStream {
        match &self.claim {
            Claim::Exclusive(key) => {
                let key = self.key(key);
                quote!(.mutex(#key))
            }
            Claim::Shared(key) => {
                let key = self.key(key);
                quote!(.rwlock(#key).read())
            }
            Claim::Permits { key, take, of } => {
                let key = self.key(key);
                let take = take.as_ref().map_or_else(|| quote!(1), |take| quote!(#take));
                quote!(.semaphore(#key, #of).take(#take))
            }
            Claim::AllOf(keys) => {
                let core = &self.core;
                let keys = keys.iter().map(|key| self.key(key));
                quote!(.all_of([#(#core::IntoKey::into_key(#keys)),*]))
            }
            Claim::AllIn(keys) => quote!(.all_of(#keys)),
        }
    }

    fn key(&self, source: &KeySource) -> TokenStream {
        match source {
            KeySource::Template(template) => template.expand(&self.core),
            KeySource::Expr(expr) => quote!(#expr),
        }
    }

    /// Runs the body under `held`; its value is returned, what is left is why there
    /// is none.
    fn work(&self, body: &Body) -> TokenStream {
        let Body { under, output, output_span, .. } = body;
        let guard = self.guard.as_ref().map(|guard| match self.when {
            None => quote_spanned!(Span::mixed_site()=> let #guard = &held;),
            Some(_) => {
                quote_spanned!(Span::mixed_site()=> let #guard = ::core::option::Option::as_ref(&held);)
            }
        });
        // Never taken; from it rustc knows what the body returns, so that a
        // mistake in the body is shown there.
        let hint = quote_spanned! {output_span.resolved_at(Span::mixed_site())=>
            if let ::core::option::Option::Some(value) = ::core::option::Option::None::<#output> {
                #[allow(unreachable_code)]
                return value;
            }
        };
        let future = quote!(async move { #hint #under });
        let run = Ident::new(if self.finish { "run_to_end" } else { "run" }, Span::mixed_site());
        let done = match (&self.when, self.finish) {
            (None, _) => quote_spanned!(Span::mixed_site()=> held.#run(#future).await),
            (Some(_), finish) => {
                let alone = if finish {
                    quote_spanned!(Span::mixed_site()=> body.await)
                } else {
                    quote_spanned!(Span::mixed_site()=> ::core::result::Result::Ok(body.await))
                };
                quote_spanned! {Span::mixed_site()=> {
                    let body = #future;
                    match &held {
                        ::core::option::Option::Some(held) => held.#run(body).await,
                        ::core::option::Option::None => #alone,
                    }
                }}
            }
        };
        if self.finish {
            return quote_spanned!(Span::mixed_site()=> #guard return #done;);
        }
        quote_spanned! {Span::mixed_site()=>
            #guard
            match #done {
                ::core::result::Result::Ok(value) => return value,
                ::core::result::Result::Err(lost) => lost,
            }
        }
    }

    fn busy(&self, body: &Body) -> Option<TokenStream> {
        let handled = self.handled(self.on_busy.as_ref()?, body);
        Some(quote_spanned! {Span::mixed_site()=>
            ::core::result::Result::Err(error) if error.kind().is_busy() => return #handled,
        })
    }

    fn failed(&self, body: &Body) -> TokenStream {
        let Body { output, output_span, .. } = body;
        let core = &self.core;
        match &self.on_error {
            Some(handler) => self.handled(handler, body),
            None => quote_spanned! {output_span.resolved_at(Span::mixed_site())=>
                <#output as #core::Fallible>::from_error(error)
            },
        }
    }

    fn handled(&self, handler: &syn::Expr, body: &Body) -> TokenStream {
        let (core, output) = (&self.core, &body.output);
        quote_spanned!(Span::mixed_site()=> #core::__private::handled::<#output>(error, #handler))
    }
}

/// With `__self` for `self`, as `#[async_trait]` calls it.
fn renamed(tokens: TokenStream) -> TokenStream {
    let rename = |token| match token {
        TokenTree::Ident(ident) if ident == "self" => {
            TokenTree::Ident(Ident::new("__self", ident.span()))
        }
        TokenTree::Group(group) => {
            let mut inner = Group::new(group.delimiter(), renamed(group.stream()));
            inner.set_span(group.span());
            TokenTree::Group(inner)
        }
        token => token,
    };
    tokens.into_iter().map(rename).collect()
}
