//! Servers that know each other, by the ids that they keep when an address changes.
//!
//! An address is no name: it may be given to a server of another group, which answers too.

use std::collections::BTreeSet;

/// The ids of servers that know each other.
pub(super) type NodeIds = BTreeSet<String>;

/// Whether these are ids of one group: most of the smaller set are in both. One is not
/// enough: a server that leaves a group and joins another one keeps its id.
pub(super) fn are_of_one_group(some: &NodeIds, others: &NodeIds) -> bool {
    let smaller = some.len().min(others.len());
    smaller > 0 && some.intersection(others).count() * 2 >= smaller
}
