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

use proc_macro2::{Span, TokenStream};
use quote::{quote, quote_spanned};

use crate::function::Body;
use crate::validate::{Claim, Plan};

impl Plan {
    /// The code with the body inside.
    pub(crate) fn around(&self, body: &Body) -> TokenStream {
        let (taken, work) = (body.renamed(self.taken()), self.work(body));
        let (busy, failed) = (self.terms.busy(body), self.terms.failed(body));
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
        let locked = quote_spanned!(Span::mixed_site()=> lock.lock().await);
        let claim = self.claim();
        let made = quote_spanned!(Span::mixed_site()=> client #claim);
        let taken = self.terms.with_client(&made, &locked);
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
                let key = key.expand(&self.terms.core);
                quote!(.mutex(#key))
            }
            Claim::Shared(key) => {
                let key = key.expand(&self.terms.core);
                quote!(.rwlock(#key).read())
            }
            Claim::Permits { key, take, of } => {
                let key = key.expand(&self.terms.core);
                let take = take.as_ref().map_or_else(|| quote!(1), |take| quote!(#take));
                quote!(.semaphore(#key, #of).permits(#take))
            }
            Claim::AllOf(keys) => {
                let core = &self.terms.core;
                let keys = keys.iter().map(|key| key.expand(core));
                quote!(.all_of([#(#core::IntoKey::into_key(#keys)),*]))
            }
            Claim::AllIn(keys) => quote!(.all_of(#keys)),
        }
    }

    /// Runs the body under `held`; its value is returned, what is left is why there
    /// is none.
    fn work(&self, body: &Body) -> TokenStream {
        let under = &body.under;
        let guard = self.guard.as_ref().map(|guard| match self.when {
            None => quote_spanned!(Span::mixed_site()=> let #guard = &held;),
            Some(_) => {
                quote_spanned!(Span::mixed_site()=> let #guard = ::core::option::Option::as_ref(&held);)
            }
        });
        let hint = body.hint();
        let future = quote!(async move { #hint #under });
        let run = self.terms.run();
        let done = match &self.when {
            None => quote_spanned!(Span::mixed_site()=> held.#run(#future).await),
            Some(_) => quote_spanned! {Span::mixed_site()=> {
                let body = #future;
                match &held {
                    ::core::option::Option::Some(held) => held.#run(body).await,
                    ::core::option::Option::None => ::core::result::Result::Ok(body.await),
                }
            }},
        };
        quote_spanned! {Span::mixed_site()=>
            #guard
            match #done {
                ::core::result::Result::Ok(value) => return value,
                ::core::result::Result::Err(lost) => lost,
            }
        }
    }
}
