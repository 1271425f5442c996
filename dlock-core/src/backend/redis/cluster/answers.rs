//! Pure: what the nodes told of the slots, and which of them is believed.
//!
//! - A map counts only if it is of the cluster that is known: an address may be given to a
//!   node of another one, whose epoch may be higher. Of several clusters that one is meant
//!   to which most nodes belong. If nearly all nodes tell of another cluster than before, it
//!   was created anew.
//! - A failover raises the epoch, so the highest one wins. Among equal epochs the map wins
//!   that most nodes tell, and then the one that gives more slots to somebody: a node that
//!   was removed and still runs, or that has just joined, has the epoch of the others and a
//!   map without their slots.
//! - A map that is older than the known one, or leaves more slots to nobody, counts only if
//!   most nodes tell it: who answers first may have been cut off.

use std::cmp::Reverse;

use super::super::node_ids::{NodeIds, are_of_one_group};
use super::slots::{Node, SlotMap};

/// The map of one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReportedSlots {
    /// The node that told.
    pub(super) teller: Node,
    /// That of the cluster, as the node knows it: if it was cut off, an old one.
    pub(super) epoch: u64,
    pub(super) map: SlotMap,
    /// Whether the node serves its slots. If all slots must be covered and some are not, it
    /// refuses every call, and for a moment longer than that.
    pub(super) is_serving: bool,
}

impl ReportedSlots {
    /// Whether the node is one of another cluster. One that was removed is of none.
    pub(super) fn is_of_another_cluster_than(&self, other: &ReportedSlots) -> bool {
        let (ids, others) = (self.map.ids(), other.map.ids());
        !ids.is_empty() && !others.is_empty() && !are_of_one_group(ids, others)
    }

    fn is_of_cluster(&self, ids: &NodeIds) -> bool {
        are_of_one_group(self.map.ids(), ids)
    }
}

/// Which map is believed; `None` if none of them.
pub(super) fn choose(
    known: &SlotMap,
    known_epoch: u64,
    asked: usize,
    answers: &[ReportedSlots],
) -> Option<ReportedSlots> {
    // Nodes that tell no ids are taken for those of one cluster.
    let anonymous = answers.iter().all(|answer| answer.map.ids().is_empty());
    let of_cluster = |ids: &NodeIds| -> Vec<&ReportedSlots> {
        let is_one = |answer: &&ReportedSlots| anonymous || answer.is_of_cluster(ids);
        answers.iter().filter(is_one).collect()
    };
    let is_known = |answer: &ReportedSlots| {
        anonymous || known.ids().is_empty() || answer.is_of_cluster(known.ids())
    };
    let clusters = answers.iter().map(|answer| (is_known(answer), of_cluster(answer.map.ids())));
    let believed = clusters.filter(|(is_known, told)| *is_known || is_anew(told.len(), asked));
    let newest = |told: &[&ReportedSlots]| told.iter().map(|it| it.epoch).max();
    let (_, told) =
        believed.max_by_key(|(is_known, told)| (*is_known, told.len(), newest(told)))?;
    let supporters =
        |one: &ReportedSlots| told.iter().filter(|it| it.map.agrees_with(&one.map)).count();
    let best =
        *told.iter().max_by_key(|it| (it.epoch, supporters(it), Reverse(it.map.uncovered())))?;
    let is_less = best.epoch < known_epoch || best.map.uncovered() > known.uncovered();
    if is_less && told.len() * 2 <= asked {
        return None;
    }
    // A node that was removed never serves again, so only primaries count.
    let primaries = best.map.primaries();
    let mut counted = told.iter().filter(|it| primaries.contains(&&it.teller));
    let is_serving = counted.all(|it| it.is_serving);
    Some(ReportedSlots { is_serving, ..best.clone() })
}

/// Whether so many nodes of those asked belong to another cluster than before that it was
/// created anew. One address alone may have been given to another server.
pub(super) fn is_anew(foreign: usize, asked: usize) -> bool {
    foreign > 1 && foreign * 2 > asked
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::super::slots::SLOTS;
    use super::*;

    /// A node `n` has this port, and an id of the same number.
    fn node(n: u16) -> Node {
        Node { host: "h".into(), port: n }
    }

    /// A map in which these nodes serve the same number of slots each, and are followed by
    /// these replicas.
    fn map(primaries: &[u16], replicas: &[u16]) -> SlotMap {
        let described = |n: u16| {
            let id = Value::BulkString(format!("id{n}").into_bytes());
            Value::Array(vec![Value::BulkString(b"h".to_vec()), Value::Int(n.into()), id])
        };
        let each = SLOTS / primaries.len().max(1);
        let ranges = primaries.iter().enumerate().map(|(place, n)| {
            let last = if place + 1 == primaries.len() { SLOTS } else { each * (place + 1) };
            let bound = |slot: usize| Value::Int(i64::try_from(slot).unwrap());
            let mut range = vec![bound(each * place), bound(last - 1), described(*n)];
            range.extend(replicas.get(place).map(|n| described(*n)));
            Value::Array(range)
        });
        SlotMap::read(&Value::Array(ranges.collect()), &node(0)).unwrap()
    }

    fn told(teller: u16, epoch: u64, map: SlotMap) -> ReportedSlots {
        ReportedSlots { teller: node(teller), epoch, map, is_serving: true }
    }

    fn before() -> SlotMap {
        map(&[1, 2, 3], &[4, 5, 6])
    }

    /// The tellers are asked together with so many that give no answer.
    fn chosen(known_epoch: u64, silent: usize, answers: &[ReportedSlots]) -> Option<ReportedSlots> {
        choose(&before(), known_epoch, answers.len() + silent, answers)
    }

    #[test]
    fn the_highest_epoch_wins_in_one_cluster() {
        let promoted = map(&[4, 2, 3], &[5, 6]);
        let answers = [told(1, 7, before()), told(2, 8, promoted.clone()), told(3, 7, before())];
        assert_eq!(chosen(7, 0, &answers).unwrap().map, promoted);
        // Who was cut off has an old map.
        let old = [told(1, 7, before())];
        assert_eq!(chosen(8, 2, &old), None);
        let answers = [told(1, 7, before()), told(2, 7, before())];
        assert_eq!(chosen(8, 1, &answers).unwrap().epoch, 7, "most nodes say so");
    }

    #[test]
    fn another_cluster_is_not_believed_whatever_its_epoch() {
        let foreign = told(1, 57, map(&[11, 12, 13], &[14, 15, 16]));
        let answers = [foreign.clone(), told(2, 12, before()), told(3, 12, before())];
        assert_eq!(chosen(12, 0, &answers).unwrap().epoch, 12);
        assert_eq!(chosen(12, 2, std::slice::from_ref(&foreign)), None, "one of three addresses");
        assert_eq!(chosen(12, 0, std::slice::from_ref(&foreign)), None, "the only one");
        // One answer of the known cluster is worth more than several of another.
        let two = [foreign.clone(), told(3, 12, before()), foreign.clone()];
        assert_eq!(chosen(12, 0, &two).unwrap().epoch, 12);
        // Nothing is known yet: most nodes count.
        let nothing = SlotMap::empty();
        assert_eq!(choose(&nothing, 0, 3, &answers).unwrap().epoch, 12);
        assert_eq!(choose(&nothing, 0, 3, &answers[..1]).unwrap().epoch, 57);
    }

    #[test]
    fn a_node_that_took_its_id_to_another_cluster_is_not_believed() {
        let moved = told(4, 57, map(&[4, 12, 13], &[]));
        assert_eq!(chosen(12, 0, std::slice::from_ref(&moved)), None);
        let answers = [moved, told(1, 12, before()), told(2, 12, map(&[1, 2, 3], &[5, 6]))];
        assert_eq!(chosen(12, 0, &answers).unwrap().epoch, 12);
    }

    #[test]
    fn a_cluster_that_was_created_anew_is_believed() {
        let anew = map(&[21, 22, 23], &[]);
        let answers = [told(1, 3, anew.clone()), told(2, 3, anew.clone())];
        assert_eq!(chosen(12, 1, &answers).unwrap().map, anew);
        assert_eq!(chosen(12, 2, &answers), None, "half of them");
    }

    #[test]
    fn a_node_that_was_removed_empties_no_map() {
        let removed = ReportedSlots { is_serving: false, ..told(4, 12, map(&[], &[])) };
        let left = map(&[1, 2, 3], &[5, 6]);
        let answers = [removed.clone(), told(1, 12, left.clone()), told(2, 12, left.clone())];
        let chosen_map = chosen(12, 0, &answers).unwrap();
        assert_eq!((chosen_map.map, chosen_map.is_serving), (left, true));
        assert_eq!(chosen(12, 5, std::slice::from_ref(&removed)), None, "it answered first");
        assert!(choose(&SlotMap::empty(), 0, 1, &[removed]).unwrap().map.ids().is_empty());
    }

    #[test]
    fn a_node_that_just_joined_empties_no_map() {
        let joined = told(7, 12, map(&[1], &[]));
        let mut partial = joined.clone();
        for slot in 5_000..SLOTS {
            partial.map.forget(u16::try_from(slot).unwrap());
        }
        let answers = [partial.clone(), told(1, 12, before()), told(2, 12, before())];
        assert_eq!(chosen(12, 0, &answers).unwrap().map, before());
        assert_eq!(chosen(12, 5, &[partial]), None);
    }

    #[test]
    fn nodes_that_serve_nothing_are_waited_for() {
        let refusing = ReportedSlots { is_serving: false, ..told(1, 12, before()) };
        let answers = [refusing, told(2, 12, before()), told(3, 12, before())];
        assert!(!chosen(12, 0, &answers).unwrap().is_serving);
        // A replica or somebody who was removed may say what it likes.
        let removed = ReportedSlots { is_serving: false, ..told(9, 12, before()) };
        let answers = [removed, told(2, 12, before()), told(3, 12, before())];
        assert!(chosen(12, 0, &answers).unwrap().is_serving);
    }
}
