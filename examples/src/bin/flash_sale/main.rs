//! A flash sale as a web service with a live page: buyers reserve units and pay for
//! them in time, or the units go back into the stock.
//!
//! Run `cargo run -p examples --bin flash_sale` and open the address that it prints.
//! On a server, make the sale first: `DLOCK_URL=redis://localhost flash_sale create` prints
//! its id, and `SALE=<id>` lets the service open it.
//! Simulated buyers (`CROWD=0` for none) reserve units. Most of them pay. The units of
//! the others come back when the payment time is over.
//!
//! | request | success | failure |
//! |---|---|---|
//! | `POST /orders/{order}?buyer=b&quantity=2` | 201 reserved, 200 already paid | 409 sold out, 410 expired, cancelled or refunded, 429 over the limit |
//! | `POST /orders/{order}/pay` | 200 sold | 410 too late: the money is given back |
//! | `DELETE /orders/{order}` | 200 cancelled | 409 already paid |
//! | `POST /orders/{order}/refund` | 200 given back | 404 no such order, 409 not paid |
//! | `GET /stock`, `GET /events` | 200 the segments, once or live | |
//! | `GET /audit` | 200 everything counted again | |
//!
//! The id of the order is the operation id. A client that got no answer can repeat its
//! request: the order is not placed twice, and an order that was refunded stays refunded.
//!
//! On Redis the sale outlives this program: stop it with Ctrl-C or SIGTERM, start it again
//! with the same `SALE`, and the sale goes on.

use std::convert::Infallible;
use std::time::Duration;

use anyhow::Result;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use dlock::Dlock;
use dlock_segment::{Confirmation, Error, HoldState, Inventory, Receipt, Refund, Reservation};
use futures_util::Stream;
use rand::RngExt as _;
use serde::{Deserialize, Serialize};

/// The name of the sale.
const SALE: &str = "phone";
/// The most units that a buyer can have.
const PER_BUYER: u64 = 4;
/// How often the page is updated.
const UPDATE_INTERVAL: Duration = Duration::from_millis(200);
/// How long requests may still take after the program was told to stop.
const GRACE: Duration = Duration::from_secs(5);

/// The value of an environment variable, or the default.
fn setting<T: std::str::FromStr>(name: &str, default: T) -> T {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// How long a buyer has to pay.
fn payment_time() -> Duration {
    Duration::from_secs(setting("PAYMENT_SECONDS", 2))
}

#[tokio::main]
async fn main() -> Result<()> {
    let dlock = examples::connect().await?;
    if std::env::args().nth(1).as_deref() == Some("create") {
        println!("{}", create(&dlock).await?.creation_id());
        return Ok(());
    }
    let sale = match std::env::var("SALE") {
        // If the store lost the sale, this fails. It never sells the stock again.
        Ok(id) => Inventory::open_created(&dlock, SALE, id.parse()?).await?,
        // The memory of this process is always empty at the start.
        Err(_) if examples::is_embedded(&dlock) => create(&dlock).await?,
        Err(_) => anyhow::bail!("set SALE to the id that `flash_sale create` printed"),
    };
    for buyer in 0..setting("CROWD", 8) {
        tokio::spawn(simulate_buyer(sale.clone(), buyer));
    }
    let shop = Router::new()
        .route("/", get(|| async { Html(include_str!("page.html")) }))
        .route("/stock", get(stock))
        .route("/events", get(events))
        .route("/audit", get(audit))
        .route("/orders/{order}", post(reserve).delete(cancel))
        .route("/orders/{order}/pay", post(pay))
        .route("/orders/{order}/refund", post(refund))
        .with_state(sale.clone());
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", setting("PORT", 3_000))).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let server = axum::serve(listener, shop).with_graceful_shutdown(told_to_stop());
    tokio::select! {
        served = server.into_future() => served?,
        // A page that is open never ends its request for updates.
        () = async { told_to_stop().await; tokio::time::sleep(GRACE).await } => {}
    }
    Ok(())
}

/// Makes the sale: once, by an administrator, and not by a service that starts.
async fn create(dlock: &Dlock) -> Result<Inventory, Error> {
    let stock = setting("STOCK", 2_000);
    Inventory::builder(dlock, SALE).stock(stock).segments(16).per_buyer(PER_BUYER).create().await
}

/// Waits for Ctrl-C or SIGTERM.
async fn told_to_stop() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate()).expect("SIGTERM can be handled");
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
        }
    }
    #[cfg(not(unix))]
    let _ = tokio::signal::ctrl_c().await;
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
    let request = sale.reserve(quantity).operation(order).buyer(buyer).expires_in(payment_time());
    match request.send().await {
        Ok(outcome) => reservation_response(outcome),
        Err(error) => error_response(&error),
    }
}

/// Only `201` asks for a payment.
fn reservation_response(outcome: Reservation) -> Response {
    let (status, message) = match outcome {
        Reservation::Held(hold) => return (StatusCode::CREATED, Json(hold)).into_response(),
        Reservation::Confirmed(_) => (StatusCode::OK, "already paid".to_owned()),
        Reservation::Refunded(receipt) => {
            let Receipt { quantity, left, .. } = receipt;
            let message = format!("paid, but only {left} of {quantity} units were not given back");
            (StatusCode::GONE, message)
        }
        Reservation::Expired(_) => {
            (StatusCode::GONE, "the payment time is over; place a new order".to_owned())
        }
        Reservation::Cancelled(_) | Reservation::Refused => {
            (StatusCode::GONE, "this order was cancelled; place a new order".to_owned())
        }
        Reservation::SoldOut { reserved, .. } => {
            let message = format!("sold out; {reserved} units are reserved and may come back");
            (StatusCode::CONFLICT, message)
        }
        Reservation::NotEnough { available, .. } => {
            (StatusCode::CONFLICT, format!("only {available} units are left; order fewer"))
        }
        Reservation::LimitReached => {
            (StatusCode::TOO_MANY_REQUESTS, "over the limit of units per buyer".to_owned())
        }
        Reservation::NotStarted { opens_in } => {
            (StatusCode::CONFLICT, format!("the sale opens in {} s", opens_in.as_secs()))
        }
        Reservation::Ended => (StatusCode::CONFLICT, "the sale is over".to_owned()),
        Reservation::Paused => (StatusCode::CONFLICT, "the sale is paused".to_owned()),
        other => (StatusCode::INTERNAL_SERVER_ERROR, format!("{other:?}")),
    };
    (status, format!("{message}\n")).into_response()
}

/// The payment arrived. It is kept only if the units are sold.
async fn pay(State(sale): State<Inventory>, Path(order): Path<String>) -> Response {
    match sale.reservation(order).confirm().await {
        Ok(Confirmation::Confirmed(_)) => "paid\n".into_response(),
        Ok(Confirmation::Refunded(receipt)) => {
            let message = format!("already refunded, {} units are left\n", receipt.left);
            (StatusCode::GONE, message).into_response()
        }
        Ok(other) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{other:?}\n")).into_response(),
        Err(Error::NotHeld(state)) => {
            let message = format!("too late ({state:?}): the money is given back\n");
            (StatusCode::GONE, message).into_response()
        }
        Err(error) => error_response(&error),
    }
}

async fn cancel(State(sale): State<Inventory>, Path(order): Path<String>) -> Response {
    match sale.reservation(order).cancel().await {
        Ok(HoldState::Confirmed | HoldState::Refunded) => {
            (StatusCode::CONFLICT, "already paid; ask for a refund\n").into_response()
        }
        Ok(state) => format!("{state:?}\n").into_response(),
        Err(error) => error_response(&error),
    }
}

/// Gives all units of a paid order back, once, however often it is asked for.
async fn refund(State(sale): State<Inventory>, Path(order): Path<String>) -> Response {
    match sale.refund(order).send().await {
        Ok(Refund::Refunded(receipt)) => {
            format!("{} given back\n", receipt.quantity).into_response()
        }
        Ok(other) => (StatusCode::CONFLICT, format!("{other:?}\n")).into_response(),
        Err(error) => error_response(&error),
    }
}

fn error_response(error: &Error) -> Response {
    let status = match error {
        Error::Invalid(_) => StatusCode::BAD_REQUEST,
        Error::NotFound(_) => StatusCode::NOT_FOUND,
        Error::Conflict(_) => StatusCode::CONFLICT,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, format!("{error}\n")).into_response()
}

/// The stock as the page shows it.
#[derive(Serialize)]
struct StockView {
    available: u64,
    reserved: u64,
    sold: u64,
    /// The available and the reserved units of each segment.
    segments: Vec<[u64; 2]>,
}

async fn stock_view(sale: &Inventory) -> Result<StockView, Error> {
    // One round trip that reads no records, because every viewer asks five times a second.
    let (stock, segments) = sale.segments().await?;
    Ok(StockView {
        available: stock.available,
        reserved: stock.reserved,
        sold: stock.sold,
        segments: segments.iter().map(|segment| [segment.available, segment.reserved]).collect(),
    })
}

async fn audit(State(sale): State<Inventory>) -> Response {
    match sale.audit().await {
        Ok(audit) => Json(audit).into_response(),
        Err(error) => error_response(&error),
    }
}

async fn stock(State(sale): State<Inventory>) -> Response {
    match stock_view(&sale).await {
        Ok(view) => Json(view).into_response(),
        Err(error) => error_response(&error),
    }
}

async fn events(
    State(sale): State<Inventory>,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let updates = futures_util::stream::unfold((sale, true), |(sale, first)| async move {
        if !first {
            tokio::time::sleep(UPDATE_INTERVAL).await;
        }
        let event = match stock_view(&sale).await {
            Ok(view) => Event::default().json_data(view).unwrap_or_default(),
            Err(error) => Event::default().event("failure").data(error.to_string()),
        };
        Some((Ok(event), (sale, false)))
    });
    Sse::new(updates).keep_alive(KeepAlive::default())
}

/// A simulated buyer: reserves, waits a little, and pays in nine of ten cases.
async fn simulate_buyer(sale: Inventory, number: u64) {
    for order in 0_u64.. {
        let id = format!("crowd-{number}-{order}");
        let request = sale.reserve(1 + order % 3).operation(id.as_str()).buyer(id.as_str());
        let reserved = request.expires_in(payment_time()).send().await;
        let (pause, pays) = {
            let mut random = rand::rng();
            (Duration::from_millis(random.random_range(10..60)), random.random_range(0..10) > 0)
        };
        tokio::time::sleep(pause).await;
        match reserved {
            Ok(Reservation::Held(_)) if pays => match sale.reservation(&id).confirm().await {
                Ok(Confirmation::Confirmed(_)) => {}
                Ok(other) => eprintln!("{id}: {other:?}"),
                Err(error) => eprintln!("{id}: {error}"),
            },
            Ok(Reservation::Held(_)) => {} // not paid: the units come back when the time is over
            Err(error) => {
                eprintln!("{id}: {error}");
                tokio::time::sleep(payment_time()).await;
            }
            Ok(_) => tokio::time::sleep(payment_time() / 4).await,
        }
    }
}
