//! The annotated function: its signature is read, its body is kept as tokens, so
//! that a body that does not parse yet is still rustc's to complain about.

use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream};
use quote::{ToTokens, quote};
use syn::parse::{Parse, ParseStream, Parser as _};
use syn::spanned::Spanned as _;
use syn::visit_mut::{VisitMut, visit_type_mut};
use syn::{
    AttrStyle, Attribute, Error, Expr, ExprAsync, FnArg, GenericArgument, GenericParam, Pat,
    PathArguments, ReturnType, Signature, Stmt, Token, Type, TypeParamBound, Visibility,
    parse_quote_spanned,
};

use crate::args::Faults;

pub(crate) struct Function {
    pub(crate) attrs: Vec<Attribute>,
    pub(crate) vis: Visibility,
    pub(crate) sig: Signature,
    /// Without its braces.
    body: TokenStream,
    braces: Span,
}

/// What runs under the lock.
pub(crate) struct Body {
    /// Runs before the lock is taken: what rebinds the arguments.
    pub(crate) before: TokenStream,
    pub(crate) under: TokenStream,
    /// Where that is.
    pub(crate) span: Span,
    /// What it returns, with `_` for what has no name.
    pub(crate) output: Type,
    /// Where errors about that belong.
    pub(crate) output_span: Span,
    /// Whether `self` is called `__self` there.
    pub(crate) renamed_self: bool,
    /// The names of arguments in scope.
    pub(crate) names: Vec<Ident>,
    boxed: bool,
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut attrs = input.call(Attribute::parse_outer)?;
        let vis = input.parse()?;
        if !starts_function(input) {
            return Err(
                input.error("a lock is held around a function: write this on an `async fn`")
            );
        }
        let sig: Signature = input.parse()?;
        if input.peek(Token![;]) {
            return Err(Error::new(
                sig.ident.span(),
                "the function has no body to run under the lock: write the attribute on each \
                 implementation of it",
            ));
        }
        let block: Group = input.parse()?;
        if block.delimiter() != Delimiter::Brace {
            return Err(Error::new(block.span(), "expected the body of the function"));
        }
        let split = |input: ParseStream<'_>| {
            Ok((input.call(Attribute::parse_inner)?, input.parse::<TokenStream>()?))
        };
        let (inner, body) = split.parse2(block.stream())?;
        attrs.extend(inner.into_iter().map(|attr| Attribute { style: AttrStyle::Outer, ..attr }));
        Ok(Function { attrs, vis, sig, body, braces: block.span() })
    }
}

fn starts_function(input: ParseStream<'_>) -> bool {
    input.peek(Token![fn])
        || input.peek(Token![async])
        || input.peek(Token![const])
        || input.peek(Token![unsafe])
        || input.peek(Token![extern])
}

impl Function {
    /// Whether a lock can be taken around it at all.
    pub(crate) fn body(&self, faults: &mut Faults) -> Option<Body> {
        let Signature { constness, abi, asyncness, .. } = &self.sig;
        if let Some(constness) = constness {
            faults.add(
                constness.span(),
                "a const function cannot wait for a lock: remove `const`, or take the lock where \
                 it is called",
            );
        }
        if let Some(abi) = abi {
            faults.add(
                abi.span(),
                "an extern function cannot wait for a lock: call an annotated `async fn` from it",
            );
        }
        let body = match asyncness {
            Some(_) => Some(self.plain()),
            None => self.boxed(),
        };
        if body.is_none() && constness.is_none() && abi.is_none() {
            faults.add(
                self.sig.fn_token.span(),
                "a lock is waited for, so the function has to be async: write `async fn`. If \
                 another attribute takes the `async` away, as #[tokio::main] does, write this \
                 one above it",
            );
        }
        body
    }

    fn plain(&self) -> Body {
        let (output, output_span) = match &self.sig.output {
            ReturnType::Default => {
                let span = self.sig.ident.span();
                (parse_quote_spanned!(span=> ()), span)
            }
            ReturnType::Type(_, output) => (Type::clone(output), output.span()),
        };
        Body {
            before: TokenStream::new(),
            under: self.body.clone(),
            span: self.braces,
            output: nameable(output),
            output_span,
            renamed_self: false,
            names: self.arguments(),
            boxed: false,
        }
    }

    /// What `#[async_trait]` has made of an `async fn` before it is our turn:
    /// `fn f(..) -> Pin<Box<dyn Future<Output = T>>> { Box::pin(async move { .. }) }`
    fn boxed(&self) -> Option<Body> {
        let ReturnType::Type(_, output) = &self.sig.output else { return None };
        let output = future_output(output)?;
        let Ok(Expr::Call(call)) = syn::parse2(self.body.clone()) else { return None };
        let is_pin = call.func.to_token_stream().to_string().ends_with("pin");
        let Some(Expr::Async(ExprAsync { block, .. })) = call.args.first().filter(|_| is_pin)
        else {
            return None;
        };
        // First the arguments get back their patterns, then `let __ret: T = { .. }`,
        // or `let _: () = { .. }`, is the body. Whatever looks otherwise was written
        // by hand, and all of it is the body.
        let at = block.stmts.iter().position(is_body_of_async_trait);
        let at = at.filter(|at| block.stmts[..*at].iter().all(only_names_arguments)).unwrap_or(0);
        let (before, under) = block.stmts.split_at(at);
        let mut names = self.arguments();
        for stmt in before {
            if let Stmt::Local(local) = stmt {
                bound(&local.pat, &mut names);
            }
        }
        Some(Body {
            before: quote!(#(#before)*),
            under: quote!(#(#under)*),
            span: self.braces,
            output_span: output.span(),
            output: nameable(output),
            renamed_self: names.iter().any(|name| name == "__self"),
            names: names.into_iter().filter(|name| !name.to_string().starts_with("__")).collect(),
            boxed: true,
        })
    }

    pub(crate) fn arguments(&self) -> Vec<Ident> {
        let mut names = Vec::new();
        for input in &self.sig.inputs {
            match input {
                FnArg::Receiver(receiver) => names.push(Ident::from(receiver.self_token)),
                FnArg::Typed(typed) => bound(&typed.pat, &mut names),
            }
        }
        for param in &self.sig.generics.params {
            if let GenericParam::Const(param) = param {
                names.push(param.ident.clone());
            }
        }
        names
    }

    /// The function with other code inside.
    pub(crate) fn around(&self, body: &Body, code: TokenStream) -> TokenStream {
        let Body { before, boxed, .. } = body;
        if *boxed {
            self.with_body(quote!(::std::boxed::Box::pin(async move { #before #code })))
        } else {
            self.with_body(code)
        }
    }

    /// The function as it is, for rustc and editors; first in its body stands what
    /// that may refer to.
    pub(crate) fn as_it_is(&self, first: &TokenStream) -> TokenStream {
        let body = &self.body;
        self.with_body(quote!(#first #body))
    }

    fn with_body(&self, code: TokenStream) -> TokenStream {
        let Function { attrs, vis, sig, braces, .. } = self;
        let mut block = Group::new(Delimiter::Brace, code);
        block.set_span(*braces);
        quote!(#(#attrs)* #vis #sig #block)
    }
}

fn is_body_of_async_trait(stmt: &Stmt) -> bool {
    let Stmt::Local(local) = stmt else { return false };
    let Pat::Type(typed) = &local.pat else { return false };
    match &*typed.pat {
        Pat::Ident(name) => name.ident == "__ret",
        Pat::Wild(_) => true,
        _ => false,
    }
}

/// `let name = name;`, `let pattern = { let __arg1 = __arg1; __arg1 };`, or the hint for
/// the type: `if let Some(__ret) = None::<T> { .. }`.
fn only_names_arguments(stmt: &Stmt) -> bool {
    match stmt {
        Stmt::Local(local) => local.init.as_ref().is_some_and(|init| match &*init.expr {
            Expr::Block(inner) => inner.block.stmts.iter().all(only_names_arguments),
            name => matches!(name, Expr::Path(_)),
        }),
        Stmt::Expr(Expr::Path(_), None) => true,
        Stmt::Expr(Expr::If(hint), _) => matches!(
            &*hint.cond,
            Expr::Let(told) if matches!(&*told.expr, Expr::Path(path)
                if path.path.segments.last().is_some_and(|last| last.ident == "None"))
        ),
        _ => false,
    }
}

/// The names that a pattern binds.
fn bound(pat: &Pat, names: &mut Vec<Ident>) {
    match pat {
        Pat::Ident(pat) => {
            names.push(pat.ident.clone());
            pat.subpat.iter().for_each(|(_, pat)| bound(pat, names));
        }
        Pat::Paren(pat) => bound(&pat.pat, names),
        Pat::Reference(pat) => bound(&pat.pat, names),
        Pat::Type(pat) => bound(&pat.pat, names),
        Pat::Slice(pat) => pat.elems.iter().for_each(|pat| bound(pat, names)),
        Pat::Struct(pat) => pat.fields.iter().for_each(|field| bound(&field.pat, names)),
        Pat::Tuple(pat) => pat.elems.iter().for_each(|pat| bound(pat, names)),
        Pat::TupleStruct(pat) => pat.elems.iter().for_each(|pat| bound(pat, names)),
        // All sides of an `or` bind the same.
        Pat::Or(pat) => pat.cases.iter().take(1).for_each(|pat| bound(pat, names)),
        _ => {}
    }
}

/// `T` of `Pin<Box<dyn Future<Output = T> + ..>>`.
fn future_output(pin: &Type) -> Option<Type> {
    let arguments = |ty: &Type, name: &str| match ty {
        Type::Path(path) => {
            let last = path.path.segments.last()?;
            match &last.arguments {
                PathArguments::AngleBracketed(arguments) if last.ident == name => {
                    match arguments.args.first()? {
                        GenericArgument::Type(ty) => Some(ty.clone()),
                        _ => None,
                    }
                }
                _ => None,
            }
        }
        _ => None,
    };
    let Type::TraitObject(future) = arguments(&arguments(pin, "Pin")?, "Box")? else {
        return None;
    };
    future.bounds.iter().find_map(|bound| {
        let TypeParamBound::Trait(bound) = bound else { return None };
        let last = bound.path.segments.last().filter(|last| last.ident == "Future")?;
        let PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
        arguments.args.iter().find_map(|argument| match argument {
            GenericArgument::AssocType(assoc) if assoc.ident == "Output" => Some(assoc.ty.clone()),
            _ => None,
        })
    })
}

/// The type as it can be written inside the function: `_` for `impl Trait`, which
/// is another type each time it is written, and for `!`.
fn nameable(mut ty: Type) -> Type {
    struct Erase;
    impl VisitMut for Erase {
        fn visit_type_mut(&mut self, ty: &mut Type) {
            match ty {
                Type::ImplTrait(_) | Type::Never(_) => *ty = parse_quote_spanned!(ty.span()=> _),
                _ => visit_type_mut(self, ty),
            }
        }
    }
    Erase.visit_type_mut(&mut ty);
    ty
}
