//! The code that `#[distributed_lock]` writes around the body:
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
//! The guard is dropped as soon as the body has returned its value. Nothing is
//! awaited after that, so a value that is not `Send` does not make the future not
//! `Send`.

use proc_macro2::{Span, TokenStream};
use quote::{quote, quote_spanned};

use super::{Claim, DistributedLock};
use crate::shared::function::Body;

/// The code of the function, with the body inside.
pub(super) fn expand(attribute: &DistributedLock, body: &Body) -> TokenStream {
    let (acquire, run) = (body.rename_self(attribute.acquire()), attribute.run(body));
    let busy_arm = attribute.common.busy_arm(body);
    let return_error = attribute.common.return_error(body);
    quote_spanned! {Span::mixed_site()=>
        let error = match #acquire {
            ::core::result::Result::Ok(held) => { #run }
            #busy_arm
            ::core::result::Result::Err(error) => error,
        };
        #return_error
    }
}

impl DistributedLock {
    /// An expression of type `Result`: the guard, or the error. With `when` the guard
    /// is an `Option`.
    fn acquire(&self) -> TokenStream {
        let primitive = self.primitive();
        let builder = quote_spanned!(Span::mixed_site()=> client #primitive);
        let lock = quote_spanned!(Span::mixed_site()=> lock.lock().await);
        let acquire = self.common.with_lock(&builder, &lock);
        match &self.when {
            None => acquire,
            Some(when) => quote_spanned! {Span::mixed_site()=>
                if #when {
                    #acquire.map(::core::option::Option::Some)
                } else {
                    ::core::result::Result::Ok(::core::option::Option::None)
                }
            },
        }
    }

    /// The method of the client that makes the lock.
    fn primitive(&self) -> TokenStream {
        let dlock = &self.common.dlock;
        match &self.claim {
            Claim::Exclusive(key) => {
                let key = key.expand(dlock);
                quote!(.mutex(#key))
            }
            Claim::Shared(key) => {
                let key = key.expand(dlock);
                quote!(.rwlock(#key).read())
            }
            Claim::Permits { key, permits, of } => {
                let key = key.expand(dlock);
                let permits = permits.as_ref().map_or_else(|| quote!(1), |count| quote!(#count));
                quote!(.semaphore(#key, #of).permits(#permits))
            }
            Claim::AllOf(keys) => {
                let key_trait = dlock.key_trait();
                let keys = keys.iter().map(|key| key.expand(dlock));
                quote!(.all_of([#(#key_trait::into_key(#keys)),*]))
            }
            Claim::AllOfExpr(keys) => quote!(.all_of(#keys)),
        }
    }

    /// Runs the body under the guard `held` and returns its value from the function.
    /// The block's own value is the error if the lock is lost.
    fn run(&self, body: &Body) -> TokenStream {
        let tokens = &body.tokens;
        let guard = self.guard.as_ref().map(|guard| match self.when {
            None => quote_spanned!(Span::mixed_site()=> let #guard = &held;),
            Some(_) => {
                quote_spanned!(Span::mixed_site()=> let #guard = ::core::option::Option::as_ref(&held);)
            }
        });
        let type_hint = body.type_hint();
        let future = quote!(async move { #type_hint #tokens });
        let run = self.common.run_method();
        let result = match &self.when {
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
            match #result {
                ::core::result::Result::Ok(value) => return value,
                ::core::result::Result::Err(lost) => lost,
            }
        }
    }
}
