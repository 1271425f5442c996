//! The code that makes the key from a template.

use proc_macro2::TokenStream;
use quote::quote;

use super::placeholder::Placeholder;
use super::template::{Piece, Template};
use crate::paths::DlockPaths;

impl Template {
    /// An expression of type `Result<Key, Error>`.
    pub(crate) fn expand(&self, dlock: &DlockPaths) -> TokenStream {
        let label = match self.variables().next() {
            Some(_) => self.source.value(),
            // Without values there is nothing to hide: the key is its own label.
            None => String::new(),
        };
        let calls = self.pieces.iter().map(|piece| match piece {
            Piece::Literal(text) => quote!(.literal(#text)),
            Piece::Placeholder(Placeholder { text, expr, spec }) => {
                let format = if spec.is_empty() { "{}".to_owned() } else { format!("{{:{spec}}}") };
                quote!(.value(#text, ::core::format_args!(#format, #expr)))
            }
        });
        let key_writer = dlock.key_writer();
        // The `let` drops the format arguments, which are not `Send`: in
        // `lock(key!("order:{id}")).await` they would live across the await.
        quote! {{
            let key = #key_writer::new(#label) #(#calls)* .finish();
            key
        }}
    }
}
