//! `#[segmented_lock]`: its options, and the code around the body.
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
//! gone before anything else is awaited: it need not be `Send`.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::spanned::Spanned as _;
use syn::{Error, Expr, ExprLit, Lit};

use crate::args::{Args, Faults, Given};
use crate::function::Body;
use crate::paths;
use crate::settings::{self, Setting, Time};
use crate::terms::{Attribute, Terms};
use crate::values::{KeySource, crate_path, expr, new_name};

/// `MAX_SEGMENTS` of dlock-segment, which this crate cannot depend on.
const MAX_SEGMENTS: u32 = 4096;
const SEGMENTS: &str = "write segments = 20, or segments = [(\"eu\", 600), (\"us\", 400)] for \
                        names and how often each comes first";

/// What was asked for, and makes sense.
pub(crate) struct Plan {
    /// The path of `dlock-segment`.
    home: TokenStream,
    terms: Terms,
    key: KeySource,
    segments: Expr,
    segment: Seen,
    guard: Seen,
}

/// What the body sees under a name.
struct Seen {
    name: Ident,
    /// Whether the user chose it; else it is there for those who want it.
    chosen: bool,
}

impl Attribute for Plan {
    const OPTIONS: &[&str] = &[
        "key", "segments", "segment", "guard", "client", "ttl", "wait", "policy", "max_hold",
        "dry_for", "prefer", "on_busy", "on_error", "on_lost", "name", "crate",
    ];

    fn new(mut args: Args, names: &[Ident], faults: &mut Faults) -> Option<Self> {
        let home = crate_path(&mut args, paths::segment(), faults);
        let mut settings = settings::settings(&mut args, false, faults);
        settings.extend(dry_for(&mut args, faults));
        settings.extend(prefer(&mut args, faults));
        let key = args.take("key");
        let key = KeySource::needed(key, &args, names, faults);
        let segments = segments(&mut args, faults);
        let core = quote!(#home::__private::core);
        let terms = Terms::new(core, settings, &mut args, faults);
        let segment = faults.note(seen(&mut args, "segment", "place", names));
        let guard = faults.note(seen(&mut args, "guard", "lock", names));
        let plan =
            Plan { home, terms, key: key?, segments: segments?, segment: segment?, guard: guard? };
        faults.is_empty().then_some(plan)
    }

    fn code(&self, body: &Body) -> TokenStream {
        let (picked, work) = (body.renamed(self.picked()), self.work(body));
        let (busy, failed) = (self.terms.busy(body), self.terms.failed(body));
        let dry = self.takes(body, &quote!(dry()));
        quote_spanned! {Span::mixed_site()=>
            let error = match #picked {
                ::core::result::Result::Ok(mut segments) => loop {
                    let next = segments.next().await;
                    match next {
                        ::core::result::Result::Ok(::core::option::Option::Some((place, held))) => {
                            #work
                            segments.dry();
                        }
                        ::core::result::Result::Ok(::core::option::Option::None) => return #dry,
                        #busy
                        ::core::result::Result::Err(error) => break error,
                    }
                },
                ::core::result::Result::Err(error) => error,
            };
            #failed
        }
    }

    fn unbound(names: &[Ident]) -> TokenStream {
        let (home, call_site) = (paths::segment(), Span::call_site());
        let bound = [("segment", quote!(Segment)), ("guard", quote!(__private::core::Guard))];
        let bound = bound.into_iter().filter(|(seen, _)| !names.iter().any(|name| name == seen));
        bound
            .map(|(seen, ty)| {
                let seen = Ident::new(seen, call_site);
                quote! {
                    #[allow(unused_variables)]
                    let #seen = #home::__private::unbound::<#home::#ty>();
                }
            })
            .collect()
    }
}

fn dry_for(args: &mut Args, faults: &mut Faults) -> Option<Setting> {
    let bounds = std::time::Duration::ZERO..=std::time::Duration::MAX;
    let (method, time) = settings::time(args, "dry_for", bounds, faults)?;
    Some(Setting { method, argument: Time::tokens(&time) })
}

fn prefer(args: &mut Args, faults: &mut Faults) -> Option<Setting> {
    let method = Ident::new("prefer", Span::call_site());
    let argument = expr(args, "prefer", "prefer = \"eu\"", faults)?;
    Some(Setting { method, argument: quote!(#argument) })
}

fn segments(args: &mut Args, faults: &mut Faults) -> Option<Expr> {
    let Some(given) = args.take("segments") else {
        if args.complete {
            faults.add(Span::call_site(), format!("in how many segments? Please {SEGMENTS}"));
        }
        return None;
    };
    faults.note(checked_segments(given))
}

fn checked_segments(given: Given) -> syn::Result<Expr> {
    let segments = given.expr(SEGMENTS)?;
    let fault = |span: Span, fault: &str| Err(Error::new(span, format!("{fault}: {SEGMENTS}")));
    match &segments {
        Expr::Lit(ExprLit { lit: Lit::Int(number), .. }) => {
            let in_bounds = number.base10_parse().is_ok_and(|n| (1..=MAX_SEGMENTS).contains(&n));
            if !in_bounds {
                return fault(number.span(), &format!("there are 1 to {MAX_SEGMENTS} segments"));
            }
        }
        Expr::Lit(literal) => {
            return fault(literal.span(), "`segments` is a number, or names with weights");
        }
        Expr::Array(array) if array.elems.is_empty() => {
            return fault(array.span(), "there is no segment");
        }
        Expr::Array(array) => {
            if let Some(bare) = array.elems.iter().find(|named| matches!(named, Expr::Lit(_))) {
                return fault(bare.span(), "a segment has a name and a weight");
            }
        }
        _ => {}
    }
    Ok(segments)
}

/// The name of the option itself, unless another one was chosen.
fn seen(args: &mut Args, option: &str, example: &str, names: &[Ident]) -> syn::Result<Seen> {
    if let Some(given) = args.take(option) {
        return Ok(Seen { name: new_name(given, example, names)?, chosen: true });
    }
    if let Some(taken) = names.iter().find(|name| *name == option) {
        let fault = format!(
            "`{option}` is an argument already, and what the body calls its {option}: write \
             {option} = {example} in the attribute, or rename the argument"
        );
        return Err(Error::new(taken.span(), fault));
    }
    Ok(Seen { name: Ident::new(option, Span::call_site()), chosen: false })
}

impl Seen {
    fn bound_to(&self, value: &TokenStream) -> TokenStream {
        let name = &self.name;
        let allowed = (!self.chosen).then(|| quote!(#[allow(unused_variables)]));
        quote_spanned!(Span::mixed_site()=> #allowed let #name = #value;)
    }
}

impl Plan {
    /// The pass over the segments, or why there is none.
    fn picked(&self) -> TokenStream {
        let Plan { home, terms, segments, .. } = self;
        let (core, key) = (&terms.core, self.key.expand(&terms.core));
        let made = quote_spanned! {Span::mixed_site()=>
            #home::__private::split(client, #key, #segments)
        };
        let pass = quote_spanned! {Span::mixed_site()=>
            ::core::result::Result::<_, #core::Error>::Ok(lock.pick())
        };
        terms.with_client(&made, &pass)
    }

    /// Runs the body on the segment `place` under `held`, and returns its value
    /// unless that is dry.
    fn work(&self, body: &Body) -> TokenStream {
        let segment = self.segment.bound_to(&quote_spanned!(Span::mixed_site()=> &place));
        let guard = self.guard.bound_to(&quote_spanned!(Span::mixed_site()=> &held));
        let (hint, under, run) = (body.hint(), &body.under, self.terms.run());
        let is_dry = self.takes(body, &quote_spanned!(Span::mixed_site()=> is_dry(&value)));
        // Where the body is, so that what rustc says of a moved argument points there.
        let here = body.span.resolved_at(Span::mixed_site());
        let future = quote_spanned!(here=> async { #hint #under });
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

    fn takes(&self, body: &Body, call: &TokenStream) -> TokenStream {
        let (home, Body { output, output_span, .. }) = (&self.home, body);
        quote_spanned! {output_span.resolved_at(Span::mixed_site())=>
            <#output as #home::MayBeDry>::#call
        }
    }
}
