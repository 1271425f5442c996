//! A flash sale as a web service: reserve, pay or lose it, and a live page.
//!
//! `cargo run -p examples --bin flash_sale`, then open the page it names. A crowd
//! of made-up buyers (`CROWD=0`: none) reserves units; most pay, some do not, and
//! their units come back when the payment time is over.
//!
//! | | | |
//! |---|---|---|
//! | `POST /orders/{order}?buyer=b&quantity=2` | 201 reserved | 409 sold out, 429 over the limit |
//! | `POST /orders/{order}/pay` | 200 sold | 410 too late |
//! | `DELETE /orders/{order}` | 200 given back | |
//! | `GET /stock`, `GET /events` | the segments, once or live | |
//!
//! The order's name is the operation id: a request that is repeated, because its
//! answer got lost, does nothing twice.

use std::convert::Infallible;
use std::time::Duration;

use anyhow::Result;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use dlock_segment::{Error, HoldState, Inventory, Reservation};
use futures_util::Stream;
use rand::RngExt as _;
use serde::{Deserialize, Serialize};

/// How long a buyer has to pay.
const PAYMENT_TIME: Duration = Duration::from_secs(2);
const PER_BUYER: u64 = 4;
/// How often the page hears of the stock.
const TICK: Duration = Duration::from_millis(200);

fn setting<T: std::str::FromStr>(name: &str, default: T) -> T {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[tokio::main]
async fn main() -> Result<()> {
    let dlock = examples::connect().await?;
    let name = format!("phone-{}", std::process::id());
    let sale = Inventory::builder(&dlock, name.as_str())
        .stock(setting("STOCK", 2_000))
        .segments(16)
        .per_buyer(PER_BUYER)
        .create()
        .await?;
    for buyer in 0..setting("CROWD", 8) {
        tokio::spawn(shop_for_ever(sale.clone(), buyer));
    }
    let shop = Router::new()
        .route("/", get(|| async { Html(include_str!("page.html")) }))
        .route("/stock", get(stock))
        .route("/events", get(events))
        .route("/orders/{order}", post(reserve).delete(cancel))
        .route("/orders/{order}/pay", post(pay))
        .with_state(sale.clone());
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", setting("PORT", 3_000))).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let stop = async {
        let _ = tokio::signal::ctrl_c().await;
    };
    tokio::select! {
        served = axum::serve(listener, shop).into_future() => served?,
        () = stop => {}
    }
    sale.remove().await?;
    Ok(())
}

#[derive(Deserialize)]
struct Order {
    buyer: String,
    #[serde(default = "one")]
    quantity: u64,
}

fn one() -> u64 {
    1
}

async fn reserve(
    State(sale): State<Inventory>,
    Path(order): Path<String>,
    Query(Order { buyer, quantity }): Query<Order>,
) -> Response {
    let reserving = sale.reserve(quantity).operation(order).buyer(buyer).expires_in(PAYMENT_TIME);
    match reserving.send().await {
        Ok(Reservation::Held(hold)) => (StatusCode::CREATED, Json(hold)).into_response(),
        Ok(Reservation::SoldOut { reserved, .. }) => {
            let words = format!("sold out; {reserved} are only reserved\n");
            (StatusCode::CONFLICT, words).into_response()
        }
        Ok(Reservation::LimitReached) => {
            (StatusCode::TOO_MANY_REQUESTS, "over the limit per buyer\n").into_response()
        }
        Ok(other) => (StatusCode::CONFLICT, format!("{other:?}\n")).into_response(),
        Err(error) => failed(&error),
    }
}

async fn pay(State(sale): State<Inventory>, Path(order): Path<String>) -> Response {
    match sale.reservation(order).confirm().await {
        Ok(HoldState::Confirmed) => "paid\n".into_response(),
        Ok(state) => (StatusCode::GONE, format!("too late: {state:?}\n")).into_response(),
        Err(error) => failed(&error),
    }
}

async fn cancel(State(sale): State<Inventory>, Path(order): Path<String>) -> Response {
    match sale.reservation(order).cancel().await {
        Ok(state) => format!("{state:?}\n").into_response(),
        Err(error) => failed(&error),
    }
}

fn failed(error: &Error) -> Response {
    let status = match error {
        Error::Invalid(_) => StatusCode::BAD_REQUEST,
        Error::NotFound(_) => StatusCode::NOT_FOUND,
        Error::Conflict(_) => StatusCode::CONFLICT,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, format!("{error}\n")).into_response()
}

/// What the page shows.
#[derive(Serialize)]
struct Seen {
    available: u64,
    reserved: u64,
    sold: u64,
    segments: Vec<[u64; 2]>,
    clean: bool,
}

async fn look(sale: &Inventory) -> Result<Seen, Error> {
    let audit = sale.audit().await?;
    Ok(Seen {
        available: audit.available,
        reserved: audit.reserved,
        sold: audit.sold,
        segments: audit
            .segments
            .iter()
            .map(|segment| [segment.counts.available, segment.counts.reserved])
            .collect(),
        clean: audit.is_clean(),
    })
}

async fn stock(State(sale): State<Inventory>) -> Response {
    match look(&sale).await {
        Ok(seen) => Json(seen).into_response(),
        Err(error) => failed(&error),
    }
}

async fn events(
    State(sale): State<Inventory>,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let looks = futures_util::stream::unfold((sale, true), |(sale, first)| async move {
        if !first {
            tokio::time::sleep(TICK).await;
        }
        let event = match look(&sale).await {
            Ok(seen) => Event::default().json_data(seen).unwrap_or_default(),
            Err(error) => Event::default().event("trouble").data(error.to_string()),
        };
        Some((Ok(event), (sale, false)))
    });
    Sse::new(looks).keep_alive(KeepAlive::default())
}

/// A made-up buyer: reserves, thinks, mostly pays.
async fn shop_for_ever(sale: Inventory, crowd: u64) {
    for order in 0_u64.. {
        let id = format!("crowd-{crowd}-{order}");
        let reserving = sale.reserve(1 + order % 3).operation(id.as_str()).buyer(id.as_str());
        let reserved = reserving.expires_in(PAYMENT_TIME).send().await;
        let (pause, pays) = {
            let mut random = rand::rng();
            (Duration::from_millis(random.random_range(10..60)), random.random_range(0..10) > 0)
        };
        tokio::time::sleep(pause).await;
        match reserved {
            Ok(Reservation::Held(_)) if pays => {
                let _ = sale.reservation(&id).confirm().await;
            }
            Ok(Reservation::Held(_)) => {} // never pays: the units come back by themselves
            Err(error) => {
                eprintln!("{id}: {error}");
                tokio::time::sleep(PAYMENT_TIME).await;
            }
            Ok(_) => tokio::time::sleep(PAYMENT_TIME / 4).await,
        }
    }
}
