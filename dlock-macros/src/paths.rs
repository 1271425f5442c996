//! Every path into `dlock` and `dlock_segment` that the macros emit.
//!
//! Paths into the standard library are written where they are emitted, always
//! from the root (`::core`, `::std`), so that no name of the user shadows them.

use proc_macro_crate::{FoundCrate, crate_name};
use proc_macro2::{Ident, Span, TokenStream};
use quote::{quote, quote_spanned};

/// The paths into `dlock`, the library of the package dlock-core.
pub(crate) struct DlockPaths {
    root: TokenStream,
}

impl DlockPaths {
    /// The paths below this one.
    pub(crate) fn below(root: TokenStream) -> Self {
        DlockPaths { root }
    }

    /// The paths under the name that the calling crate gave to the library.
    pub(crate) fn found() -> Self {
        Self::below(library("dlock-core", "dlock"))
    }

    /// The type of the client.
    pub(crate) fn client(&self) -> TokenStream {
        join(&self.root, quote!(Dlock))
    }

    /// The function that returns the global client.
    pub(crate) fn global(&self) -> TokenStream {
        join(&self.root, quote!(global))
    }

    /// The error type.
    pub(crate) fn error(&self) -> TokenStream {
        join(&self.root, quote!(Error))
    }

    /// The type of a guard.
    pub(crate) fn guard(&self) -> TokenStream {
        join(&self.root, quote!(Guard))
    }

    /// The trait of what can be made into a key.
    pub(crate) fn key_trait(&self) -> TokenStream {
        join(&self.root, quote!(IntoKey))
    }

    /// The trait of what can be made from a lock error, at the span where rustc
    /// complains if the return type does not implement it.
    pub(crate) fn fallible(&self, span: Span) -> TokenStream {
        join(&self.root, quote_spanned!(span=> Fallible))
    }

    /// The type that writes a key from literals and values.
    pub(crate) fn key_writer(&self) -> TokenStream {
        join(&self.root, quote!(__private::KeyWriter))
    }

    /// The function that calls `on_busy` or `on_error`.
    pub(crate) fn handled(&self) -> TokenStream {
        join(&self.root, quote!(__private::handled))
    }
}

/// The paths into `dlock_segment`.
pub(crate) struct SegmentPaths {
    root: TokenStream,
}

impl SegmentPaths {
    /// The paths below this one.
    pub(crate) fn below(root: TokenStream) -> Self {
        SegmentPaths { root }
    }

    /// The paths under the name that the calling crate gave to the library.
    pub(crate) fn found() -> Self {
        Self::below(library("dlock-segment", "dlock_segment"))
    }

    /// The paths into `dlock`, as `dlock_segment` re-exports it: the calling crate
    /// need not depend on it.
    pub(crate) fn dlock(&self) -> DlockPaths {
        DlockPaths::below(join(&self.root, quote!(__private::core)))
    }

    /// The type of a segment.
    pub(crate) fn segment(&self) -> TokenStream {
        join(&self.root, quote!(Segment))
    }

    /// The trait of what can say that a segment is dry, at the span where rustc
    /// complains if the return type does not implement it.
    pub(crate) fn may_be_dry(&self, span: Span) -> TokenStream {
        join(&self.root, quote_spanned!(span=> MayBeDry))
    }

    /// The function that makes the segmented lock.
    pub(crate) fn split(&self) -> TokenStream {
        join(&self.root, quote!(__private::split))
    }

    /// The function that stands for a value when the attribute has an error.
    pub(crate) fn unbound(&self) -> TokenStream {
        join(&self.root, quote!(__private::unbound))
    }
}

fn join(root: &TokenStream, rest: TokenStream) -> TokenStream {
    quote!(#root::#rest)
}

/// The path of a library, under the name that the calling crate gave to it.
fn library(package: &str, library: &str) -> TokenStream {
    let name = match crate_name(package) {
        // The dependency is not renamed, so the code knows it by the name of its
        // library, which `crate_name` does not know. A dependency that is renamed to
        // `dlock_core` looks the same; its crate needs `extern crate dlock_core as dlock`.
        Ok(FoundCrate::Name(name)) if name == package.replace('-', "_") => library.to_owned(),
        Ok(FoundCrate::Name(name)) => name,
        // `Itself`: the package's own doctests, tests and examples know the library
        // by this name only, and the library calls itself so by `extern crate self`.
        // `Err`: there is no manifest, or it does not name the package. If the
        // library really is missing, rustc says so.
        Ok(FoundCrate::Itself) | Err(_) => library.to_owned(),
    };
    let name = Ident::new(&name, Span::call_site());
    quote!(::#name)
}
