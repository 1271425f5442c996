//! The code that every attribute writes around the body.
//!
//! Its variables are invisible to the body (`Span::mixed_site`). What the user wrote
//! keeps its spans, and is emitted once.

use proc_macro2::{Group, Ident, Span, TokenStream, TokenTree};
use quote::{quote, quote_spanned};
use syn::Expr;
use syn::spanned::Spanned as _;

use super::builder_calls::BuilderCall;
use super::function::Body;
use super::validate::{CommonOptions, OnLost};

impl CommonOptions {
    /// An expression of type `Result`. `builder` makes the lock's builder from the
    /// variable `client`; `acquire` uses the variable `lock`, which is that builder
    /// after all calls on it. If there is no client, the result is the error.
    pub(crate) fn with_lock(&self, builder: &TokenStream, acquire: &TokenStream) -> TokenStream {
        let calls = self
            .builder_calls
            .iter()
            .map(|BuilderCall { method, argument }| quote!(.#method(#argument)));
        let lock = quote_spanned!(Span::mixed_site()=> #builder #(#calls)*);
        match &self.client {
            // The borrow of the client ends before the wait begins.
            Some(expr) => {
                let client_type = self.dlock.client();
                let borrowed = quote_spanned!(expr.span()=> &#expr);
                quote_spanned! {Span::mixed_site()=> {
                    let lock = {
                        let client: &#client_type = #borrowed;
                        #lock
                    };
                    #acquire
                }}
            }
            None => {
                let global = self.dlock.global();
                quote_spanned! {Span::mixed_site()=>
                    match #global() {
                        ::core::result::Result::Ok(client) => {
                            let client = &client;
                            let lock = #lock;
                            #acquire
                        }
                        ::core::result::Result::Err(error) => ::core::result::Result::Err(error),
                    }
                }
            }
        }
    }

    /// The method of the guard that runs the body.
    pub(crate) fn run_method(&self) -> Ident {
        let method = match self.on_lost {
            OnLost::Cancel => "run",
            OnLost::Finish => "run_if_held",
        };
        Ident::new(method, Span::mixed_site())
    }

    /// The match arm that calls `on_busy`, if there is one.
    pub(crate) fn busy_arm(&self, body: &Body) -> Option<TokenStream> {
        let handled = self.handled(self.on_busy.as_ref()?, body);
        Some(quote_spanned! {Span::mixed_site()=>
            ::core::result::Result::Err(error) if error.kind().is_busy() => return #handled,
        })
    }

    /// What the function returns for the variable `error`.
    pub(crate) fn return_error(&self, body: &Body) -> TokenStream {
        let Body { output, output_span, .. } = body;
        let span = output_span.resolved_at(Span::mixed_site());
        match &self.on_error {
            Some(handler) => self.handled(handler, body),
            None => {
                let fallible = self.dlock.fallible(span);
                quote_spanned!(span=> <#output as #fallible>::from_error(error))
            }
        }
    }

    fn handled(&self, handler: &Expr, body: &Body) -> TokenStream {
        let (handled, output) = (self.dlock.handled(), &body.output);
        let handler = body.rename_self(quote!(#handler));
        quote_spanned!(Span::mixed_site()=> #handled::<#output>(error, #handler))
    }
}

impl Body {
    /// Code of the user from outside the body, with the name that `self` has inside.
    pub(crate) fn rename_self(&self, tokens: TokenStream) -> TokenStream {
        if self.self_is_renamed { rename_self(tokens) } else { tokens }
    }

    /// A return that never happens. From it rustc knows the type that the body
    /// returns, and shows a type error where it is in the body.
    pub(crate) fn type_hint(&self) -> TokenStream {
        let Body { output, output_span, .. } = self;
        quote_spanned! {output_span.resolved_at(Span::mixed_site())=>
            if let ::core::option::Option::Some(value) = ::core::option::Option::None::<#output> {
                #[allow(unreachable_code)]
                return value;
            }
        }
    }
}

/// Replaces `self` by `__self`, the name that `#[async_trait]` gives to it.
fn rename_self(tokens: TokenStream) -> TokenStream {
    let rename = |token| match token {
        TokenTree::Ident(ident) if ident == "self" => {
            TokenTree::Ident(Ident::new("__self", ident.span()))
        }
        TokenTree::Group(group) => {
            let mut inner = Group::new(group.delimiter(), rename_self(group.stream()));
            inner.set_span(group.span());
            TokenTree::Group(inner)
        }
        token => token,
    };
    tokens.into_iter().map(rename).collect()
}
