//! What rustc shows for a template or an attribute that breaks a rule: one file
//! per rule.
//!
//! After a wanted change: `TRYBUILD=overwrite cargo test -p dlock-macros --test ui`.

#[test]
fn ui() {
    trybuild::TestCases::new().compile_fail("tests/ui/*/*.rs");
}
