//! The annotated function. Its signature is parsed; its body is kept as tokens, so
//! that rustc reports a syntax error in it as it does without the attribute.

use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};
use quote::quote;
use syn::parse::{Parse, ParseStream, Parser as _};
use syn::spanned::Spanned as _;
use syn::visit_mut::{VisitMut, visit_type_mut};
use syn::{
    AttrStyle, Attribute, Error, FnArg, GenericParam, Pat, ReturnType, Signature, Token, Type,
    Visibility, parse_quote_spanned,
};

use super::errors::Errors;

/// The annotated function.
pub(crate) struct Function {
    attrs: Vec<Attribute>,
    vis: Visibility,
    pub(super) sig: Signature,
    /// The body without its braces.
    pub(super) body: TokenStream,
    /// The span of the body's braces.
    pub(super) braces: Span,
}

/// The code that runs under the lock.
pub(crate) struct Body {
    /// The statements that bind the arguments to their names. They run before the
    /// lock is taken.
    pub(crate) before: TokenStream,
    /// The code that runs under the lock.
    pub(crate) tokens: TokenStream,
    pub(crate) span: Span,
    /// The type that the body returns, with `_` for a part that cannot be named.
    pub(crate) output: Type,
    /// The span for errors about the return type.
    pub(crate) output_span: Span,
    /// Whether `self` is called `__self` in the body.
    pub(crate) self_is_renamed: bool,
    /// The names of the arguments, as the body sees them.
    pub(crate) arguments: Vec<Ident>,
    /// Whether the function returns a boxed future.
    pub(super) is_boxed: bool,
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut attrs = input.call(Attribute::parse_outer)?;
        let vis = input.parse()?;
        if !starts_function(input) {
            return Err(
                input.error("this attribute works only on functions: write it on an `async fn`")
            );
        }
        let sig: Signature = input.parse()?;
        if input.peek(Token![;]) {
            return Err(Error::new(
                sig.ident.span(),
                "the function has no body to run under the lock: write the attribute on its \
                 implementations",
            ));
        }
        let block = block(input.parse()?)?;
        let split = |input: ParseStream<'_>| {
            Ok((input.call(Attribute::parse_inner)?, input.parse::<TokenStream>()?))
        };
        let (inner, body) = split.parse2(block.stream())?;
        attrs.extend(inner.into_iter().map(|attr| Attribute { style: AttrStyle::Outer, ..attr }));
        Ok(Function { attrs, vis, sig, body, braces: block.span() })
    }
}

/// The body in its braces. A `$body:block` of a `macro_rules!` comes in a group without
/// delimiters.
fn block(token: TokenTree) -> syn::Result<Group> {
    let span = token.span();
    if let TokenTree::Group(group) = token {
        match group.delimiter() {
            Delimiter::Brace => return Ok(group),
            Delimiter::None => {
                let mut inside = group.stream().into_iter();
                if let (Some(token), None) = (inside.next(), inside.next()) {
                    return block(token);
                }
            }
            _ => {}
        }
    }
    Err(Error::new(span, "expected the body of the function in braces"))
}

fn starts_function(input: ParseStream<'_>) -> bool {
    input.peek(Token![fn])
        || input.peek(Token![async])
        || input.peek(Token![const])
        || input.peek(Token![unsafe])
        || input.peek(Token![extern])
}

impl Function {
    /// The body, if a lock can be taken around it.
    pub(crate) fn lockable_body(&self, errors: &mut Errors) -> Option<Body> {
        let Signature { constness, abi, asyncness, .. } = &self.sig;
        if let Some(constness) = constness {
            errors.add(
                constness.span(),
                "a const function cannot wait for a lock: write `async fn`, or write the \
                 attribute on the function that calls this one",
            );
        }
        if let Some(abi) = abi {
            errors.add(
                abi.span(),
                "an extern function cannot wait for a lock: write the attribute on an `async fn` \
                 that this one calls",
            );
        }
        let body = match asyncness {
            Some(_) => Some(self.async_body()),
            None => self.boxed_body(),
        };
        if body.is_none() && constness.is_none() && abi.is_none() {
            errors.add(
                self.sig.fn_token.span(),
                "the function must be async, because it waits for the lock: write `async fn`. If \
                 another attribute removes the `async`, as #[tokio::main] does, write this \
                 attribute above that one",
            );
        }
        body
    }

    /// The body of an `async fn`.
    fn async_body(&self) -> Body {
        let (output, output_span) = match &self.sig.output {
            ReturnType::Default => {
                let span = self.sig.ident.span();
                (parse_quote_spanned!(span=> ()), span)
            }
            ReturnType::Type(_, output) => (Type::clone(output), output.span()),
        };
        Body {
            before: TokenStream::new(),
            tokens: self.body.clone(),
            span: self.braces,
            output: nameable(output),
            output_span,
            self_is_renamed: false,
            arguments: self.arguments(),
            is_boxed: false,
        }
    }

    /// The names that the arguments bind, and the const generics.
    pub(crate) fn arguments(&self) -> Vec<Ident> {
        let mut names = Vec::new();
        for input in &self.sig.inputs {
            match input {
                FnArg::Receiver(receiver) => names.push(Ident::from(receiver.self_token)),
                FnArg::Typed(typed) => bound_names(&typed.pat, &mut names),
            }
        }
        for param in &self.sig.generics.params {
            if let GenericParam::Const(param) = param {
                names.push(param.ident.clone());
            }
        }
        names
    }

    /// The function with this code instead of its body.
    pub(crate) fn with_code(&self, body: &Body, code: TokenStream) -> TokenStream {
        let Body { before, is_boxed, .. } = body;
        if *is_boxed {
            self.with_body(quote!(::std::boxed::Box::pin(async move { #before #code })))
        } else {
            self.with_body(code)
        }
    }

    /// The function without a lock, for rustc and editors. Its body starts with
    /// these declarations.
    pub(crate) fn without_lock(&self, declarations: &TokenStream) -> TokenStream {
        let body = &self.body;
        self.with_body(quote!(#declarations #body))
    }

    fn with_body(&self, code: TokenStream) -> TokenStream {
        let Function { attrs, vis, sig, braces, .. } = self;
        let mut block = Group::new(Delimiter::Brace, code);
        block.set_span(*braces);
        quote!(#(#attrs)* #vis #sig #block)
    }
}

/// Adds the names that a pattern binds.
pub(super) fn bound_names(pat: &Pat, names: &mut Vec<Ident>) {
    match pat {
        Pat::Ident(pat) => {
            names.push(pat.ident.clone());
            pat.subpat.iter().for_each(|(_, pat)| bound_names(pat, names));
        }
        Pat::Paren(pat) => bound_names(&pat.pat, names),
        Pat::Reference(pat) => bound_names(&pat.pat, names),
        Pat::Type(pat) => bound_names(&pat.pat, names),
        Pat::Slice(pat) => pat.elems.iter().for_each(|pat| bound_names(pat, names)),
        Pat::Struct(pat) => pat.fields.iter().for_each(|field| bound_names(&field.pat, names)),
        Pat::Tuple(pat) => pat.elems.iter().for_each(|pat| bound_names(pat, names)),
        Pat::TupleStruct(pat) => pat.elems.iter().for_each(|pat| bound_names(pat, names)),
        // All cases of an `or` pattern bind the same names.
        Pat::Or(pat) => pat.cases.iter().take(1).for_each(|pat| bound_names(pat, names)),
        _ => {}
    }
}

/// The type as it can be written inside the function: with `_` for `impl Trait`,
/// which is a different type each time it is written, and for `!`.
pub(super) fn nameable(mut ty: Type) -> Type {
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
