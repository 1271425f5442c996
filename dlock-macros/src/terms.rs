//! What every attribute has: whose lock it is, how it is taken, and what is
//! returned when it is not; and the code for that.

use proc_macro2::{Group, Ident, Span, TokenStream, TokenTree};
use quote::{quote, quote_spanned};
use syn::Expr;
use syn::spanned::Spanned as _;

use crate::args::{Args, Faults};
use crate::function::Body;
use crate::settings::Setting;
use crate::values::{expr, one_of};

/// An attribute, understood.
pub(crate) trait Attribute: Sized {
    /// Every option that it has.
    const OPTIONS: &[&str];

    /// What was asked for; or none, and the faults say why.
    fn new(args: Args, names: &[Ident], faults: &mut Faults) -> Option<Self>;

    /// The code with the body inside.
    fn code(&self, body: &Body) -> TokenStream;

    /// For a body whose attribute is not understood: what it may still refer to.
    fn unbound(_names: &[Ident]) -> TokenStream {
        TokenStream::new()
    }
}

pub(crate) struct Terms {
    /// The path of `dlock-core`.
    pub(crate) core: TokenStream,
    client: Option<Expr>,
    settings: Vec<Setting>,
    on_busy: Option<Expr>,
    on_error: Option<Expr>,
    /// Whether the body runs to its end when the lock is lost.
    pub(crate) finish: bool,
}

impl Terms {
    pub(crate) fn new(
        core: TokenStream,
        settings: Vec<Setting>,
        args: &mut Args,
        faults: &mut Faults,
    ) -> Self {
        let on_lost = args.take("on_lost").and_then(|given| {
            faults.note(one_of(given, &["cancel", "finish"], "on_lost = \"finish\""))
        });
        Terms {
            core,
            client: expr(args, "client", "client = self.dlock", faults),
            settings,
            on_busy: expr(args, "on_busy", "on_busy = |error| ..", faults),
            on_error: expr(args, "on_error", "on_error = |error| ..", faults),
            finish: on_lost.is_some_and(|word| word == "finish"),
        }
    }

    /// A result: that of `used`, which has the `lock` that `made` and the settings
    /// make of the `client`; or why there is no client.
    pub(crate) fn with_client(&self, made: &TokenStream, used: &TokenStream) -> TokenStream {
        let Terms { core, client, settings, .. } = self;
        let calls = settings.iter().map(|Setting { method, argument }| quote!(.#method(#argument)));
        let lock = quote_spanned!(Span::mixed_site()=> #made #(#calls)*);
        match client {
            // The borrow of the client ends before the wait begins.
            Some(expr) => {
                let borrowed = quote_spanned!(expr.span()=> &#expr);
                quote_spanned! {Span::mixed_site()=> {
                    let lock = {
                        let client: &#core::Dlock = #borrowed;
                        #lock
                    };
                    #used
                }}
            }
            None => quote_spanned! {Span::mixed_site()=>
                match #core::global() {
                    ::core::result::Result::Ok(client) => {
                        let client = &client;
                        let lock = #lock;
                        #used
                    }
                    ::core::result::Result::Err(error) => ::core::result::Result::Err(error),
                }
            },
        }
    }

    /// The method of a guard that runs the body.
    pub(crate) fn run(&self) -> Ident {
        Ident::new(if self.finish { "run_if_held" } else { "run" }, Span::mixed_site())
    }

    /// The arm for an `error` that means busy.
    pub(crate) fn busy(&self, body: &Body) -> Option<TokenStream> {
        let handled = self.handled(self.on_busy.as_ref()?, body);
        Some(quote_spanned! {Span::mixed_site()=>
            ::core::result::Result::Err(error) if error.kind().is_busy() => return #handled,
        })
    }

    /// What is returned for an `error`.
    pub(crate) fn failed(&self, body: &Body) -> TokenStream {
        let Body { output, output_span, .. } = body;
        let core = &self.core;
        match &self.on_error {
            Some(handler) => self.handled(handler, body),
            None => quote_spanned! {output_span.resolved_at(Span::mixed_site())=>
                <#output as #core::Fallible>::from_error(error)
            },
        }
    }

    fn handled(&self, handler: &Expr, body: &Body) -> TokenStream {
        let (core, output) = (&self.core, &body.output);
        let handler = body.renamed(quote!(#handler));
        quote_spanned!(Span::mixed_site()=> #core::__private::handled::<#output>(error, #handler))
    }
}

impl Body {
    /// What the user wrote outside the body, as it is to be written there.
    pub(crate) fn renamed(&self, tokens: TokenStream) -> TokenStream {
        if self.renamed_self { renamed(tokens) } else { tokens }
    }

    /// Never taken; from it rustc knows what the body returns, so that a mistake in
    /// the body is shown there.
    pub(crate) fn hint(&self) -> TokenStream {
        let Body { output, output_span, .. } = self;
        quote_spanned! {output_span.resolved_at(Span::mixed_site())=>
            if let ::core::option::Option::Some(value) = ::core::option::Option::None::<#output> {
                #[allow(unreachable_code)]
                return value;
            }
        }
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
