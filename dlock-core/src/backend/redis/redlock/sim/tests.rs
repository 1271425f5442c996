//! What the simulation proves, and that it would find it if it were not so.

use rand::SeedableRng as _;
use rand::rngs::StdRng;

use super::super::model::{Node, NodeBug};
use super::super::quorum::{
    AttemptId, NodeReply, NodeRequest, Outcome, QuorumSize, Round, silence,
};
use super::super::quorum_claim::QuorumClaim;
use super::{EPOCH, Planted, Simulation, TTL, claim};
use crate::claim::{Owner, ReleaseOutcome};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Operation};

fn simulate(seed: u64, planted: Planted) -> Simulation {
    let mut simulation = Simulation::new(seed, planted);
    simulation.run();
    simulation
}

/// A number from the environment, for longer runs.
fn seeds() -> u64 {
    std::env::var("DLOCK_TEST_SEEDS").ok().and_then(|it| it.parse().ok()).unwrap_or(300)
}

#[test]
fn nobody_holds_it_twice_and_tokens_rise() {
    let (mut grants, mut restored) = (0, 0);
    for seed in 0..seeds() {
        let simulation = simulate(seed, Planted::Nothing);
        assert_eq!(simulation.violations, Vec::<String>::new(), "seed {seed}");
        grants += simulation.grants;
        restored += simulation.restored;
    }
    println!("{grants} grants, {restored} leases restored");
    assert!(grants > seeds() * 20, "{grants} grants only");
    assert!(restored > 0);
}

/// What a node says to a client's round, or has said.
fn ask(node: &mut Node, time: u64, round: &Round) -> NodeReply {
    node.ask(EPOCH + time, &round.ask, 1_000_000)
}

/// Why a node that has forgotten its votes must not take a lease again either: two clients
/// would hold the lock, each by a majority that the node was part of.
#[test]
fn a_node_that_lost_its_data_restores_nothing() {
    for bug in [None, Some(NodeBug::RestoresAfterRestart)] {
        let quorum = QuorumSize::of(5);
        let new = || Node::new(EPOCH - 60_000_000, silence(TTL), bug);
        let mut nodes: Vec<Node> = (0..5).map(|_| new()).collect();
        let at = |time: u64| Moment::from_nanos(time * 1_000);
        let mut random = StdRng::seed_from_u64(1);
        let (asks, other_asks) = (claim(&mut random), claim(&mut random));
        let mut holder = QuorumClaim::new(quorum, asks.owner, 0);
        let mut other = QuorumClaim::new(quorum, other_asks.owner, 0);
        // Three nodes hear the holder.
        let mut round = holder.acquire(at(0), EPOCH, 1, &asks);
        let mut granted = None;
        for place in [0, 1, 2] {
            let reply = ask(&mut nodes[place], 1_000, &round);
            granted = granted.or(round.on_reply(at(2_000), place, reply));
        }
        holder.settle(&round, granted.expect("a majority"));
        // The other two vote for somebody else, whose requests to the rest are late.
        let mut late = other.acquire(at(700_000), EPOCH + 700_000, 1, &other_asks);
        for place in [3, 4] {
            let reply = ask(&mut nodes[place], 701_000, &late);
            assert!(late.on_reply(at(702_000), place, reply).is_none());
        }
        nodes[4].loses_data(EPOCH + 750_000, None);
        // The holder renews at two of its nodes, and at the one that has forgotten its vote.
        let mut renewal = holder.renew(at(800_000), EPOCH + 800_000, &asks).expect("a lease");
        let mut renewed = None;
        for place in [0, 1, 4] {
            let reply = ask(&mut nodes[place], 801_000, &renewal);
            renewed = renewed.or(renewal.on_reply(at(802_000), place, reply));
        }
        // Its lease at the third has ended when the late request arrives there.
        let reply = ask(&mut nodes[2], 1_050_000, &late);
        let second = late.on_reply(at(1_051_000), 2, reply);
        assert!(matches!(second, Some(Outcome::Granted(_))), "{second:?}");
        let both = matches!(renewed, Some(Outcome::Held { .. } | Outcome::Extended(_)));
        assert_eq!(both, bug.is_some(), "{renewed:?}");
    }
}

#[test]
fn every_planted_bug_is_found() {
    for planted in [
        Planted::HalfIsEnough,
        Planted::CountedFromReply,
        Planted::CountsAnswers,
        Planted::Node(NodeBug::VotesAfterRestart),
        Planted::Node(NodeBug::ForgetsRegister),
        Planted::Node(NodeBug::UndoIgnoresTheTry),
    ] {
        let found = (0..5_000).find(|seed| !simulate(*seed, planted).violations.is_empty());
        println!("{planted:?} found with seed {found:?}");
        assert!(found.is_some(), "{planted:?} is not found");
    }
}

fn failed() -> NodeReply {
    NodeReply::Refused(Error::new(ErrorKind::Unavailable, Operation::Acquire).with_message("down"))
}

fn taken() -> NodeReply {
    let by = AttemptId { owner: Owner::from_bits(9), attempt: 1 };
    NodeReply::HeldByOther { by, next: 1, free_in: TTL, holder: None }
}

fn yes() -> NodeReply {
    NodeReply::Accepted { others_wait: false, extended: false }
}

/// What comes of a round in which nodes say this, one after the other.
fn outcome(mut round: Round, replies: impl IntoIterator<Item = NodeReply>) -> Option<Outcome> {
    let now = Moment::default();
    replies.into_iter().enumerate().find_map(|(node, reply)| round.on_reply(now, node, reply))
}

/// Whoever hears of too few nodes does not know whether the lock is busy, in whatever order
/// the answers come.
#[test]
fn a_majority_out_of_reach_is_not_busy() {
    let acquire = || {
        let asks = claim(&mut StdRng::seed_from_u64(1));
        QuorumClaim::new(QuorumSize::of(5), asks.owner, 0).acquire(
            Moment::default(),
            EPOCH,
            1,
            &asks,
        )
    };
    for replies in [
        [taken(), taken(), failed(), failed(), failed()],
        [taken(), failed(), yes(), failed(), failed()],
        [failed(), failed(), taken(), yes(), failed()],
    ] {
        let outcome = outcome(acquire(), replies);
        assert!(matches!(&outcome, Some(Outcome::NoMajority(_))), "{outcome:?}");
    }
    let divided = outcome(acquire(), [taken(), yes(), taken(), failed()]);
    assert!(matches!(divided, Some(Outcome::Split { .. })), "{divided:?}");
}

/// A node that is stopped could decide a divided try, and keeps nobody waiting for that.
#[test]
fn a_divided_try_does_not_wait_for_a_stopped_node() {
    let asks = claim(&mut StdRng::seed_from_u64(1));
    let mut own = QuorumClaim::new(QuorumSize::of(5), asks.owner, 0);
    let mut round = own.acquire(Moment::default(), EPOCH, 1, &asks);
    for (node, reply) in [yes(), yes(), failed()].into_iter().enumerate() {
        assert!(round.on_reply(Moment::default(), node, reply).is_none());
        assert!(!round.is_divided(), "nobody else wants it");
        assert!(round.decide_divided().is_none());
    }
    assert!(round.on_reply(Moment::default(), 3, taken()).is_none(), "the fifth may vote for it");
    let divided = round.decide_divided();
    assert!(matches!(divided, Some(Outcome::Split { .. })), "{divided:?}");
    assert_eq!(round.may_have_voted().collect::<Vec<_>>(), [0, 1, 4], "all are taken back");
    assert!(round.on_reply(Moment::default(), 4, yes()).is_none(), "it is decided");
}

/// A release is over when a majority has answered it, whoever voted and does not answer.
#[test]
fn a_release_waits_for_no_node_beyond_a_majority() {
    let release = |voted: [bool; 5]| {
        let attempt_id = AttemptId { owner: Owner::from_bits(9), attempt: 1 };
        let now = Moment::default();
        Round::new(QuorumSize::of(5), NodeRequest::Release { attempt_id }, now, TTL, voted.to_vec())
    };
    let replies = || [yes(), yes(), NodeReply::NoLease];
    let answered = outcome(release([true, true, false, true, false]), replies());
    let held = Outcome::Released(ReleaseOutcome::Released);
    assert_eq!(format!("{answered:?}"), format!("{:?}", Some(held)));
    // Nobody else can have it, so it was lost.
    let answered = outcome(release([true, true, true, false, false]), replies());
    let lost = Outcome::Released(ReleaseOutcome::AlreadyLost);
    assert_eq!(format!("{answered:?}"), format!("{:?}", Some(lost)));
    assert!(outcome(release([true; 5]), [yes(), yes(), failed()]).is_none());
}
