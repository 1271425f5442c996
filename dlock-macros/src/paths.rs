//! The paths that the macros emit.

use proc_macro_crate::{FoundCrate, crate_name};
use proc_macro2::{Ident, Span, TokenStream};
use quote::quote;

/// The path of `dlock-core`, under the name the calling crate gave it.
pub(crate) fn core() -> TokenStream {
    of("dlock-core", "dlock")
}

/// The path of `dlock-segment`, likewise.
pub(crate) fn segment() -> TokenStream {
    of("dlock-segment", "dlock_segment")
}

fn of(package: &str, lib: &str) -> TokenStream {
    let name = match crate_name(package) {
        // As a dependency it goes by the name of its library, unless it is renamed.
        Ok(FoundCrate::Name(name)) if name == package.replace('-', "_") => lib.to_owned(),
        Ok(FoundCrate::Name(name)) => name,
        // Itself: its doctests, tests and examples know it by this name only, and
        // its lib calls itself so by `extern crate self`. Not found: a build
        // without Cargo, a build script; if it really is missing, rustc says so.
        Ok(FoundCrate::Itself) | Err(_) => lib.to_owned(),
    };
    let name = Ident::new(&name, Span::call_site());
    quote!(::#name)
}
