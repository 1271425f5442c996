//! A function that `#[async_trait]` has changed before our attribute sees it:
//!
//! ```text
//! fn f(..) -> Pin<Box<dyn Future<Output = T>>> { Box::pin(async move { .. }) }
//! ```

use quote::{ToTokens as _, quote};
use syn::spanned::Spanned as _;
use syn::{
    Expr, ExprAsync, GenericArgument, Pat, PathArguments, ReturnType, Stmt, Type, TypeParamBound,
};

use super::function::{Body, Function, bound_names, nameable};

impl Function {
    /// The body, if the function has the form that `#[async_trait]` makes.
    pub(super) fn boxed_body(&self) -> Option<Body> {
        let ReturnType::Type(_, output) = &self.sig.output else { return None };
        let output = future_output(output)?;
        let Ok(Expr::Call(call)) = syn::parse2(self.body.clone()) else { return None };
        let is_pin = call.func.to_token_stream().to_string().ends_with("pin");
        let Some(Expr::Async(ExprAsync { block, .. })) = call.args.first().filter(|_| is_pin)
        else {
            return None;
        };
        // First the arguments get back their patterns; then `let __ret: T = { .. }`, or
        // `let _: () = { .. }`, is the body. A block that looks different was written
        // by hand, and all of it is the body.
        let at = block.stmts.iter().position(is_body);
        let at = at.filter(|at| block.stmts[..*at].iter().all(only_binds_arguments)).unwrap_or(0);
        let (before, tokens) = block.stmts.split_at(at);
        let mut arguments = self.arguments();
        for stmt in before {
            if let Stmt::Local(local) = stmt {
                bound_names(&local.pat, &mut arguments);
            }
        }
        Some(Body {
            before: quote!(#(#before)*),
            tokens: quote!(#(#tokens)*),
            span: self.braces,
            output_span: output.span(),
            output: nameable(output),
            self_is_renamed: arguments.iter().any(|name| name == "__self"),
            arguments: arguments
                .into_iter()
                .filter(|name| !name.to_string().starts_with("__"))
                .collect(),
            is_boxed: true,
        })
    }
}

/// Whether the statement is the user's body: `let __ret: T = { .. }`.
fn is_body(stmt: &Stmt) -> bool {
    let Stmt::Local(local) = stmt else { return false };
    let Pat::Type(typed) = &local.pat else { return false };
    match &*typed.pat {
        Pat::Ident(name) => name.ident == "__ret",
        Pat::Wild(_) => true,
        _ => false,
    }
}

/// Whether the statement is one that `#[async_trait]` writes before the body:
/// `let name = name;`, `let pattern = { let __arg1 = __arg1; __arg1 };`, or the type
/// hint `if let Some(__ret) = None::<T> { .. }`.
fn only_binds_arguments(stmt: &Stmt) -> bool {
    match stmt {
        Stmt::Local(local) => local.init.as_ref().is_some_and(|init| match &*init.expr {
            Expr::Block(inner) => inner.block.stmts.iter().all(only_binds_arguments),
            name => matches!(name, Expr::Path(_)),
        }),
        Stmt::Expr(Expr::Path(_), None) => true,
        Stmt::Expr(Expr::If(hint), _) => matches!(
            &*hint.cond,
            Expr::Let(condition) if matches!(&*condition.expr, Expr::Path(path)
                if path.path.segments.last().is_some_and(|last| last.ident == "None"))
        ),
        _ => false,
    }
}

/// The `T` of `Pin<Box<dyn Future<Output = T> + ..>>`.
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
