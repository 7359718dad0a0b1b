//! Check and repair, with `qemu-img check` as the oracle.

mod clean;
mod crash;
mod damage;
mod hostile;
mod lies;
mod random_damage;
mod refused_headers;
mod repair;
mod support;
